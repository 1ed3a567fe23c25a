"""Converted weights in transformers: load them, let them speak, evaluate, calibrate.

Needs the extra ``ktforge[hf]``. Raises ConfigError where torch or transformers (5 or newer) is missing.
"""

import ktforge.hf.needs  # noqa: F401  (first: the others cannot be imported without)
from ktforge.hf.calibration import calibrate
from ktforge.hf.evaluation import evaluate
from ktforge.hf.model import from_pretrained
from ktforge.hf.result import Evaluation

__all__ = ["Evaluation", "calibrate", "evaluate", "from_pretrained"]
