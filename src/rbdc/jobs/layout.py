"""What lies where in a run's folder.

RUN/
  run.json          what was asked for; a later start must ask for the same
  run.lock          who is at work
  result.json       accuracies and FLOPs, of the tree and of standard training beside it
  model/            the trained target, as timm loads it
  jobs/             the store: a folder a job
    resnet18d-w0.5-0123456789abcdef/
      job.json          what the job is: the content its key is the hash of
      result.json       what came out; it is there when, and only when, the job is finished
      failed.json       why it could not be finished
      progress.json     how far it is
      lease             on a cluster: which attempt at the job may write here
      model/            the trained model, as timm loads it; ema/ and best/ likewise
      start/            of a coupling: what the wide model starts with
      kept/             for the coupling: the optimizer's state, where it is carried over
      checkpoints/      of a training under way
      summary.csv, log.jsonl, blocks.jsonl, tensorboard/
      predictions/      of a detector: what it finds in the validation images, in COCO's format
      scores.json       of a detector: what pycocotools says of that, by class too
      sheet.png         of a detector: some of it, drawn
      weights.json      of a detector: what became of the classifier's weights
"""

RUN, RESULT, LOCK, JOBS = "run.json", "result.json", "run.lock", "jobs"
JOB, FAILED, PROGRESS = "job.json", "failed.json", "progress.json"
MODEL, AVERAGE, START, KEPT = "model", "ema", "start", "kept"
CHECKPOINTS, LEASE = "checkpoints", "lease"
PREDICTIONS, SCORES, SHEET, WEIGHTS = "predictions", "scores.json", "sheet.png", "weights.json"
