"""Texts with the ids that Hugging Face's tokenizers give them, and ids with their texts, for
several tokenizers.
"""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer

TEXTS = 10_000
FOLDERS = {
    "base-7m": Path(__file__).resolve().parents[2] / "models" / "base-7m",
    "smollm2": Path.home() / ".cache" / "ssdevice-models" / "smollm2-135m",
}
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = [
    " ",
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    " \n",
    "   ",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u0085",
    "\u200b",
    "\v",
]
WRITTEN = """
the singer's names we'll don't I'm they've you'd SELECT WHERE Zürich naïve façade Straße \
ＡＢＣ ﬁne ſtop 'ſ 'S 'LL 'Re
'vE кириллица Ελληνικά עברית العربية हिन्दी ไทย 日本語 한국어 你好 ქართული ᏣᎳᎩ \
e\u0301clair ñ n\u0303 👍🏽 🙂
👩\u200d👩\u200d👧 🇩🇪 ❤️ ½ Ⅷ ² ٣٤٥ १२३ 一二三 12 345 6789 0 3.14 1e-5 x1y2 _id \
__init__ camelCase HTTPServer -- …
“quoted” «mots» € ± → ∑ <|end|> <|user|> <|im_start|> <|im_end <tool> <tool>s tooltool \
</s> \ufeff \u202e \u0000
' '' 's' 'sam
"""
WORDS = WRITTEN.split()
CODE = (
    "def f(x):\n    return x ** 2  # squares\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }\n\n\n",
    "SELECT COUNT(*) FROM t WHERE a >= 3.50 AND b = 'Zürich';",
    '{"key": [1, 2, {"nested": null}], "text": "a\\nb"}',
    '<div class="x">\r\n\t<p>It\'s</p>\r\n</div>',
    "let x = y?.z ?? `${w}`;\t\t// ok",
)


def texts() -> list[str]:
    """Ten thousand short texts: words of many scripts, code, white space, and any characters that
    Unicode has.
    """
    rng = Random(0)
    assigned = [
        chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) not in ("Cn", "Cs", "Co")
    ]
    makers = (
        lambda: "".join(
            rng.choice(WORDS) + rng.choice(SPACES) * rng.randint(0, 2)
            for _ in range(rng.randint(1, 12))
        ),
        lambda: (
            "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 9)))
            + rng.choice(["", "a", "1", ".", "'s"])
        ),
        lambda: _cut(rng, "".join(rng.choice(CODE) for _ in range(rng.randint(1, 3)))),
        lambda: "".join(rng.choice(assigned) for _ in range(rng.randint(1, 12))),
        lambda: "".join(
            chr(rng.choice([rng.randint(0, 0x2FF), rng.randint(32, 126)]))
            for _ in range(rng.randint(0, 20))
        ),
        lambda: "".join(rng.choice("'sStTlLvVeErRmMdDſ \n0") for _ in range(rng.randint(1, 12))),
    )
    return [rng.choice(makers)() for _ in range(TEXTS)]


def write(place: Path) -> None:
    """Write a folder for each tokenizer: the tokenizer, and its ids of all texts and texts of
    random ids.
    """
    every = texts()
    place.mkdir(exist_ok=True)
    (place / "texts.json").write_text(json.dumps(every), "utf-8")
    made = {
        name: Tokenizer.from_file(str(at / "tokenizer.json"))
        for name, at in FOLDERS.items()
        if at.is_dir()
    }
    made["llama3"] = trained(every, r"\p{N}{1,3}", ignore_merges=True)
    made["qwen2"] = trained(every, r"\p{N}", normalize=True)
    for name, tokenizer in made.items():
        folder = place / name
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
        ids = [encoding.ids for encoding in tokenizer.encode_batch(every, add_special_tokens=False)]
        rng = Random(1)
        size = tokenizer.get_vocab_size()
        runs = []
        for _ in range(1000):
            runs.append([rng.randrange(size + 2) for _ in range(rng.randint(1, 12))])
        decoded = [
            {"ids": run, "text": tokenizer.decode(run, skip_special_tokens=True)} for run in runs
        ]
        (folder / "ids.json").write_text(json.dumps({"ids": ids, "decoded": decoded}), "utf-8")


def trained(
    every: list[str], digits: str, *, ignore_merges: bool = False, normalize: bool = False
) -> Tokenizer:
    """A small vocabulary learned from the texts, with a real model's rules for words."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(BPE(ignore_merges=ignore_merges))
    words: PreTokenizer = Split(Regex(GPT4.replace("DIGITS", digits)), "isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|end|>", "<|im_start|>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(every, trainer)
    tokenizer.add_tokens(
        [
            AddedToken("<tool>", normalized=False),
            AddedToken("<tool>s", normalized=True),
            "e\u0301clair",
        ]
    )
    if normalize:
        tokenizer.normalizer = NFC()
    return tokenizer


def _cut(rng: Random, text: str) -> str:
    start, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    return text[start:end]
