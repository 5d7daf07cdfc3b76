"""Precisions of ML Programs, whichever target carries them, and how far they may be from the float32 model."""

from __future__ import annotations

from collections.abc import Mapping

from ssdevice.bundle.manifest import Precision

BITS: Mapping[Precision, float] = {
    Precision.FP16: 16.0,
    Precision.INT8: 8.1,
    Precision.INT4: 5.0,
    Precision.PALETTE4: 4.5,
}
"""What a weight takes on disk, scales included."""
WEIGHTS_ALONE = "weights alone are compressed: activations are float16"
