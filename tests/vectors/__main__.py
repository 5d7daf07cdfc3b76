"""``python -m tests.vectors`` writes the files here that hosts in other languages follow."""

from __future__ import annotations

from tests.vectors import sampling, sessions

if __name__ == "__main__":
    for each in (sampling, sessions):
        each.FILE.write_text(each.text(each.record()), "utf-8")
