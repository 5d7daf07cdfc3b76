"""onnxruntime-genai on models that its own builder makes of the Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssdevice.peers.arm import Answer, Arm, Json, Offers, Setup, Skip, UnavailableError

NAME = "genai"
PRECISIONS = ("int4", "int8")
CONFIG = "genai_config.json"
BUILDER = "onnxruntime_genai.models.builder"
OPTIONS = ("accuracy_level=4", "block_size=32")
"""Products of integers; both are what the builder takes for CPUs."""


def offers(setup: Setup) -> Offers:
    """Plain decoding at each precision; builds what is not built yet."""
    for precision in PRECISIONS:
        name = f"{NAME} {precision}, plain"
        if setup.genai is None:
            yield Skip(name, "--genai names the folder that keeps the models it builds")
            continue
        folder = setup.genai / f"{setup.model.resolve().name}-{precision}"
        try:
            if not (folder / CONFIG).is_file():
                build(setup.python(NAME), setup.model, folder, precision)
        except UnavailableError as error:
            yield Skip(name, str(error))
            continue
        yield Arm(
            name=name,
            module=__name__,
            settings=setup.settings(folder=str(folder), precision=precision),
            disk_bytes=sum(file.stat().st_size for file in folder.iterdir()),
            python=setup.python(NAME),
        )


def build(python: str, model: Path, folder: Path, precision: str) -> None:
    """Run the builder.

    It needs torch and transformers in the same environment. Raises UnavailableError.
    """
    folder = folder.resolve()  # the builder runs in a folder of its own
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as made:
        out = Path(made) / "out"
        command = [python, "-m", BUILDER]
        command += ["-i", str(model.resolve()), "-o", str(out), "-c", str(Path(made) / "cache")]
        command += ["-p", precision, "-e", "cpu", "--extra_options", *OPTIONS]
        try:
            done = subprocess.run(
                command, cwd=made, capture_output=True, text=True, errors="replace"
            )
        except OSError as error:
            raise UnavailableError(
                f"{python} cannot be started ({error.strerror or error})"
            ) from error
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise UnavailableError(f"its builder failed: {said[-1]}")
        out.rename(folder)


def open_engine(settings: Json) -> Genai:
    """The model in a folder of the builder."""
    return Genai(**settings)


class Genai:
    """``precision``: what the folder was built with."""

    def __init__(
        self,
        folder: str,
        threads: int,
        context: int,
        stops: Sequence[int],
        sampling: Json,
        precision: str,
    ) -> None:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(folder)
        decoder = {"session_options": {"intra_op_num_threads": threads}}
        settings = {"model": {"eos_token_id": list(stops), "decoder": decoder}}
        config.overlay(json.dumps(settings))
        model = onnxruntime_genai.Model(config)
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            max_length=context, repetition_penalty=1.0, batch_size=1, **_search(sampling)
        )
        self._generator: Any = onnxruntime_genai.Generator(model, params)
        self.version = f"onnxruntime-genai {onnxruntime_genai.__version__}"
        self.weights = precision

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        """See ``Engine``."""
        self._generator.rewind_to(0)  # cheaper than a new generator: its cache stays allocated
        self._generator.append_tokens(list(prompt))
        while not answer.ended:
            self._generator.generate_next_token()
            answer.add((int(self._generator.get_next_tokens()[0]),))


def _search(sampling: Json) -> Json:
    """The options of a search that samples as asked; without a seed each run is another."""
    options = {"do_sample": bool(sampling), **sampling}
    if "seed" in options:
        options["random_seed"] = options.pop("seed")
    return options
