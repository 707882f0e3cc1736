"""The files of a run's folder.

RUN/
  run.json          the request, what decides the result, and how the run is run
  run.lock          the process that holds the folder
  result.json       a row per trial: scores and FLOPs, of the tree and of standard training
  model/            the trained target, as timm loads it
  jobs/             the store: one folder per job
    resnet18d-w0.5-0123456789abcdef/
      job.json          the content that the job's key is the hash of
      result.json       the result; it exists when, and only when, the job is finished
      failed.json       why the job failed
      progress.json     how far it is
      lease             on a cluster: which attempt at the job may write here
      model/            the trained model, as timm loads it; ema/ and best/ likewise
      start/            of a growth job: where the wide model's training starts
      saved_for_growth/ state beside the weights that the method which widens this model needs
      checkpoints/      of an unfinished training
      summary.csv, log.jsonl, blocks.jsonl, tensorboard/
      predictions/      of a detector: what it finds in the validation images, in COCO's format
      scores.json       of a detector: pycocotools' scores, by class too
      sheet.png         of a detector: some predictions, drawn
      weights.json      of a detector: which of the classifier's weights it took over
"""

RUN, RESULT, LOCK, JOBS = "run.json", "result.json", "run.lock", "jobs"
JOB, FAILED, PROGRESS = "job.json", "failed.json", "progress.json"
MODEL, AVERAGE, START, SAVED_FOR_GROWTH = "model", "ema", "start", "saved_for_growth"
CHECKPOINTS, LEASE = "checkpoints", "lease"
PREDICTIONS, SCORES, SHEET, WEIGHTS = "predictions", "scores.json", "sheet.png", "weights.json"
