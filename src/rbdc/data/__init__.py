"""Open a data set by name or path, and make batches that depend only on (seed, epoch, step)."""

from rbdc.data.augment import ImageFormat
from rbdc.data.batches import (
    Batch,
    EvaluationBatches,
    TrainingBatches,
    check_batch_size,
    check_image_size,
)
from rbdc.data.images import DataSet, ImageSet, ImageSource, memory_data
from rbdc.data.randomness import derive_seed
from rbdc.data.small import embedded
from rbdc.data.sources import Own, open_data
from rbdc.data.text import TextBatches, TextData, TextEvaluation, TextFormat
from rbdc.data.text_sources import open_text
from rbdc.data.tokenizer import Tokenizer
