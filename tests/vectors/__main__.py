"""``python -m tests.vectors`` writes ``sampling.json``, what hosts in other languages must choose."""

from __future__ import annotations

from tests.vectors.sampling import FILE, record, text

if __name__ == "__main__":
    FILE.write_text(text(record()), "utf-8")
