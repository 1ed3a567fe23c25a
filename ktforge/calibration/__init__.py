"""Statistics of what flows into experts, which quantizers ask for: ktforge's own file, and llama.cpp's imatrix.

``ktforge calibrate`` writes ktforge's: safetensors with the metadata ``format`` ``ktforge-calibration``, ``version``
``1``, ``activation`` (what is applied to gate, as config.json calls it), ``tokens`` and ``model``. For layer ``L``:

- ``layers.L.tokens`` I64 [experts]: tokens that were routed to each expert;
- ``layers.L.gate_up`` F32 [experts, hidden]: mean square of each channel of what goes into gate and up;
- ``layers.L.down`` F32 [experts, expert size]: the same for down;
- if they were asked for, ``layers.L.inputs`` BF16 [n, hidden], inputs of the layer's experts, and ``layers.L.routed``
  I32 [n, top_k], the experts that each was routed to.
"""

from ktforge.calibration.file import open_calibration, write_calibration
from ktforge.calibration.statistics import Calibration, LayerStatistics

__all__ = ["Calibration", "LayerStatistics", "open_calibration", "write_calibration"]
