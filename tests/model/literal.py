"""The papers' equations, written out row by row and without a cache (2402.11131 eq. 1 to 4).

``Literal`` recomputes a decoder of Llama's or Mistral's kind from the token sequence for every row,
one attention sum at a time, with nothing of ssdevice in it but the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ssdevice.config import StreamConfig, StreamMLP


class Literal:
    """Logits of main rows and of streams, straight from the equations; slow on purpose.

    ``weights``, ``streams``: tensors by name, as Hugging Face and an adapter folder have them.
    """

    def __init__(
        self,
        hf: Any,
        weights: Mapping[str, Tensor],
        config: StreamConfig,
        streams: Mapping[str, Tensor],
    ) -> None:
        self.config = config
        self.hf = hf
        self.window = getattr(hf, "sliding_window", None) or math.inf
        self.weights = {name: value.double() for name, value in weights.items()}
        self.streams = {name: value.double() for name, value in streams.items()}
        for i in range(config.draft_layers):
            ours = f"own.layers.{i}."
            theirs = f"model.layers.{hf.num_hidden_layers + i}."
            own = {
                name.removeprefix(ours): value
                for name, value in self.streams.items()
                if name.startswith(ours)
            }
            self.weights |= {theirs + name: value for name, value in own.items()}

    def linear(self, layer: int, name: str, x: Tensor, stream: bool) -> Tensor:
        """W x, and on stream rows in lossless mode W x + B A x."""
        y = self.weights[f"model.layers.{layer}.{name}.weight"] @ x
        key = f"adapters.{layer}-{name.replace('.', '-')}"
        if stream and f"{key}.down.weight" in self.streams:
            y = y + self.streams[f"{key}.up.weight"] @ (self.streams[f"{key}.down.weight"] @ x)
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.scaled(self.weights[f"model.{name}.weight"], x)

    def scaled(self, weight: Tensor, x: Tensor) -> Tensor:
        return weight * x / (x.pow(2).mean() + self.hf.rms_norm_eps).sqrt()

    def rotate(self, heads: Tensor, position: int) -> Tensor:
        """Each pair (i, i + dim/2) of a head turned by position * theta_i."""
        dim = heads.shape[-1]
        out = heads.clone()
        for i in range(dim // 2):
            angle = position * self.hf.rope_parameters["rope_theta"] ** (-2 * i / dim)
            a = heads[:, i]
            b = heads[:, i + dim // 2]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def layer(
        self,
        layer: int,
        h: Sequence[Tensor],
        positions: Sequence[int],
        sees: Sequence[set[int]],
        main: int,
    ) -> list[Tensor]:
        """One decoder layer on rows ``h``, of which the first ``main`` are main rows; row i sees
        rows ``sees[i]``.
        """
        heads = self.hf.num_attention_heads
        groups = self.hf.num_attention_heads // self.hf.num_key_value_heads
        dim = self.hf.head_dim
        q = []
        k = []
        v = []
        for i, row in enumerate(h):
            x = self.norm(f"layers.{layer}.input_layernorm", row)
            stream = i >= main
            q.append(
                self.rotate(
                    self.linear(layer, "self_attn.q_proj", x, stream).view(-1, dim), positions[i]
                )
            )
            k.append(
                self.rotate(
                    self.linear(layer, "self_attn.k_proj", x, stream).view(-1, dim), positions[i]
                )
            )
            v.append(self.linear(layer, "self_attn.v_proj", x, stream).view(-1, dim))
        out = []
        for i, row in enumerate(h):
            stream = i >= main
            seen = sorted(j for j in sees[i] if positions[i] - positions[j] < self.window)
            mixed = []
            for head in range(heads):
                scores = torch.stack(
                    [q[i][head] @ k[j][head // groups] / math.sqrt(dim) for j in seen]
                )
                weights = scores.softmax(0)
                mixed.append(
                    sum(w * v[j][head // groups] for w, j in zip(weights, seen, strict=True))
                )
            row = row + self.linear(layer, "self_attn.o_proj", torch.cat(mixed), stream)
            out.append(
                row
                + self.mlp(
                    layer, self.norm(f"layers.{layer}.post_attention_layernorm", row), stream
                )
            )
        return out

    def mlp(self, layer: int, x: Tensor, stream: bool) -> Tensor:
        silu = torch.nn.functional.silu
        key = f"adapters.{layer}-mlp"
        if stream and f"{key}.down.weight" in self.streams:
            inner = self.streams[f"{key}.down.weight"] @ x
            linear = self.config.stream_mlp is StreamMLP.ADAPTER_ONLY
            return self.streams[f"{key}.up.weight"] @ (inner if linear else silu(inner))
        gate, up = (self.linear(layer, f"mlp.{name}_proj", x, stream) for name in ("gate", "up"))
        return self.linear(layer, "mlp.down_proj", silu(gate) * up, stream)

    def stream_logits(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Main logits ``[V]`` and stream logits ``[γ, V]`` of the last of ``tokens``."""
        t = len(tokens) - 1
        first = self.hf.num_hidden_layers - self.config.msa_layers
        h = [self.weights["model.embed_tokens.weight"][token] for token in tokens]
        positions = list(range(t + 1))
        sees = [set(range(i + 1)) for i in range(t + 1)]
        states = []
        for layer in range(first):
            h = self.layer(layer, h, positions, sees, t + 1)
            states.append(h)
        # S_tj at layer N - N_s = f(M_t) + P_j (+ g of the chosen token), at position t + j (eq. 3
        # and 4).
        final = h
        for layer in range(first, self.hf.num_hidden_layers):
            final = self.layer(layer, final, positions, sees, t + 1)
        embedding = self.weights["model.embed_tokens.weight"][int(self.head(final[t]).argmax())]
        if self.config.draft_layers:
            return self.head(final[t]), self.own_logits(states, embedding)
        for j in range(1, self.config.gamma + 1):
            start = h[t]
            if self.config.init_rank:
                start = self.streams["f.up.weight"] @ (self.streams["f.down.weight"] @ h[t])
            if self.config.token_rank:
                both = torch.cat([h[t], embedding])
                ahead = self.streams["token.up.weight"] @ (self.streams["token.down.weight"] @ both)
                start = start + ahead.view(self.config.gamma, -1)[j - 1]
            if not self.config.msa_layers:
                inner = torch.nn.functional.silu(self.streams[f"heads.{j - 1}.down.weight"] @ h[t])
                start = start + self.streams[f"heads.{j - 1}.up.weight"] @ inner
            h = [*h, start + self.streams["identifiers"][j - 1]]
            positions.append(t + j)
            # Stream j sees M_1 .. M_t and S_t1 .. S_tj; no main row sees a stream (eq. 1 and 2).
            sees.append(set(range(t + 1)) | {t + i for i in range(1, j + 1)})
        for layer in range(first, self.hf.num_hidden_layers):
            h = self.layer(layer, h, positions, sees, t + 1)
        logits = [self.head(h[t])]
        for row in h[t + 1 :]:
            logits.append(
                self.head(row, self.weights["model.embed_tokens.weight"][int(logits[-1].argmax())])
            )
        return logits[0], torch.stack(logits[1:])

    def own_logits(self, states: Sequence[Sequence[Tensor]], embedding: Tensor) -> Tensor:
        """Logits ``[γ, V]`` of own layers: draft j of row t is a row at t + j, after the rows 1..t
        of fused states.

        ``states``: those of the rows after each of the base's layers.
        """
        t = len(states[0]) - 1
        last = len(states)
        positions = list(range(t + 1))
        sees = [set(range(i + 1)) for i in range(t + 1)]
        taps = [states[round(last * share) - 1] for share in (0.27, 0.63, 1.0)]
        fuse = self.streams["own.fuse.weight"]
        embed = self.streams["own.embed.weight"]
        scales = self.streams["own.embed_norm.weight"]
        read = []
        for r in range(t + 1):
            normed = []
            for i, tap in enumerate(taps):
                normed.append(self.scaled(self.streams[f"own.norms.{i}.weight"], tap[r]))
            read.append(fuse @ torch.cat(normed))
        state = read[t]
        logits = list[Tensor]()
        for j in range(1, self.config.gamma + 1):
            read.append(
                state + embed @ self.scaled(scales, embedding) + self.streams["identifiers"][j - 1]
            )
            positions.append(t + j)
            sees.append(set(range(t + j + 1)))
            out = read
            for layer in range(last, last + self.config.draft_layers):
                out = self.layer(layer, out, positions, sees, t + 1)
            state = out[-1]
            logits.append(
                self.weights["lm_head.weight"] @ self.scaled(self.streams["own.norm.weight"], state)
            )
            embedding = self.weights["model.embed_tokens.weight"][int(logits[-1].argmax())]
        return torch.stack(logits)

    def head(self, row: Tensor, before: Tensor | None = None) -> Tensor:
        """Logits of a final state; ``before`` embeds the token before the one that a stream
        guesses.
        """
        x = self.norm("norm", row)
        if before is not None and self.config.follow_rank:
            inner = torch.nn.functional.silu(
                self.streams["follow.down.weight"] @ torch.cat([x, before])
            )
            x = x + self.streams["follow.up.weight"] @ inner
        return self.weights["lm_head.weight"] @ x
