"""The subjects before any change: a tiny exported bundle, the same signed, and an adapter of
streams and LoRA.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

SEED = 0
SLOT_APP = "two"


def make(out: Path) -> Path:
    """Write ``bundle``, ``signed``, ``slots``, ``public.pem``, ``base`` and ``adapter`` below
    ``out``, a new folder.
    """
    from tests.runtime.tiny_bundle import adapter_folder, base_folder, tiny_bundle

    out.mkdir(parents=True)
    shutil.copytree(tiny_bundle("fp32").folder, out / "bundle")
    shutil.copytree(base_folder(), out / "base")
    shutil.copytree(adapter_folder(), out / "adapter")
    _add_lora(out / "base", out / "adapter")
    _sign(out)
    _export_slots(out)
    return out


def _export_slots(out: Path) -> None:
    from ssdevice.export.plan import ExportOptions, Quant
    from ssdevice.export.stages import export_bundle
    from tests.runtime.tiny_bundle import CHUNK, CONTEXT, TREE

    options = ExportOptions(
        model=str(out / "base"),
        target="onnx",
        quant=Quant.FP32,
        out=out / "slots",
        adapters=(("one", out / "adapter"), (SLOT_APP, out / "adapter")),
        tree=TREE,
        context=CONTEXT,
        chunk=CHUNK,
    )
    export_bundle(options, lambda *_: None)


def _add_lora(base: Path, adapter: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    from ssdevice.model.loading import load_hf

    torch.manual_seed(SEED)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    get_peft_model(load_hf(base), config).save_pretrained(str(adapter))
    (adapter / "README.md").unlink(missing_ok=True)
    raw = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    (adapter / "adapter_config.json").write_text(
        json.dumps({**raw, "base_model_name_or_path": "base"}), "utf-8"
    )


def _sign(out: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from ssdevice.bundle.integrity import sign_bundle

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    private = out / "private.pem"
    private.write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    (out / "public.pem").write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    shutil.copytree(out / "bundle", out / "signed")
    sign_bundle(out / "signed", private)
