"""The subjects before any change: a tiny exported bundle, the same signed, and an adapter of streams and LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

SEED = 0


def make(out: Path) -> Path:
    """Write ``bundle``, ``signed``, ``public.pem``, ``base`` and ``adapter`` below ``out``, a new folder."""
    from tests.runtime.tiny_bundle import adapter_folder, base_folder, tiny_bundle

    out.mkdir(parents=True)
    shutil.copytree(tiny_bundle().folder, out / "bundle")
    shutil.copytree(base_folder(), out / "base")
    shutil.copytree(adapter_folder(), out / "adapter")
    _add_lora(out / "base", out / "adapter")
    _sign(out)
    return out


def _add_lora(base: Path, adapter: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    from ssdevice.model.loading import load_hf

    torch.manual_seed(SEED)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(load_hf(base), config).save_pretrained(str(adapter))
    (adapter / "README.md").unlink(missing_ok=True)
    raw = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    (adapter / "adapter_config.json").write_text(json.dumps({**raw, "base_model_name_or_path": "base"}), "utf-8")


def _sign(out: Path) -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from ssdevice.signature import sign_bundle

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    private = out / "private.pem"
    private.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    (out / "public.pem").write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    shutil.copytree(out / "bundle", out / "signed")
    sign_bundle(out / "signed", private)
