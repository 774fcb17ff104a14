"""The backbone with gradients, over batches of rows: encoder on all columns, decoder on the last ones (spec §5)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from kernels.config import LayerRole, ModelConfig
from kernels.ops.engram import hash_tables, table_rows
from kernels.ops.rope import frequencies
from run.train import attention
from run.train.attention import Global, View
from run.train.layers import Mix, Turn, Weights, add_memory, collapse, expand, experts, mix, norm, rotate
from run.train.packing import Batch


@dataclass
class Pass:
    """What a pass gives: `hidden` [B, R, D] of the decoder's columns before the last norm; `taps`, as many [B, R, D].

    `index_loss`, the KL of each indexer; `guide_loss`, of the guided heads of each group of layers; `loads` by layer,
    picks of each expert for text and for images.
    """

    hidden: torch.Tensor
    taps: list[torch.Tensor] = field(default_factory=list)
    index_loss: list[torch.Tensor] = field(default_factory=list)
    guide_loss: list[torch.Tensor] = field(default_factory=list)
    loads: dict[int, torch.Tensor] = field(default_factory=dict)
    shared: Global | None = None  # compressed rows of the last KV owner, while the pass goes on
    guides: bool = False


class Backbone:
    """The constants of a configuration; weights are given with each call."""

    def __init__(self, config: ModelConfig, pad: int) -> None:
        self.config, self.pad = config, pad
        c = config
        self.local_freqs = frequencies(c.qk_rope_head_dim, c.rope_theta, None)
        self.freqs = frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling)
        self.tables = hash_tables(
            c.engram_layer_ids,
            c.engram_max_ngram_size,
            c.engram_n_heads,
            c.engram_vocab_size,
            c.engram_compressed_vocab_size,
        )

    def forward(
        self,
        w: Weights,
        batch: Batch,
        images: torch.Tensor | None,
        *,
        select: bool,
        probe: int,
        guide: bool = False,
    ) -> Pass:
        """`images` [n, D] are the rows of the batch's image tokens in order.

        With `select` queries see only what the indexers pick, else all. `probe` says which piece of the queries the
        indexers learn from; where the decoder computes fewer columns than the encoder, its own learn from all of them.
        With `guide` some heads of the decoder are held to where the next token stands already.
        """
        c = self.config
        rows, columns = batch.tokens.shape
        x = functional.embedding(batch.tokens, w["embed.weight"]).flatten(0, 1)
        if images is not None:
            x = x.index_put((batch.is_image.flatten().nonzero().squeeze(1),), images)
        streams = x.unsqueeze(1).repeat(1, c.hc_mult, 1)
        pre = torch.zeros(len(x), c.hc_mult)
        pre[:, 0] = 1.0
        found = Pass(x, guides=guide)
        view = self._view(batch, 0)
        probed = attention.pieces(view, columns)
        some = probed[probe % len(probed)]
        for role in c.layers:
            name = role.name
            if role.engram is not None:
                history = batch.history[:, view.start :].flatten(0, 1)
                ids = table_rows(history, self.pad, self.tables[role.engram])
                alive = ~batch.is_image[:, view.start :].flatten()
                streams = add_memory(streams, ids, alive, w, f"{name}.engram")
            if role.layer in c.dspark_target_layer_ids:
                found.taps.append(streams.mean(1).view(rows, view.num, -1))
            x = norm(collapse(streams, pre), w[f"{name}.attn_norm.weight"]).view(rows, view.num, -1)
            if role.owns_kv:
                self._close(found)
                found.shared = attention.compress(x, w, f"{name}.attn", role, c, view.turn)
            if role.layer == c.first_decoder_layer and batch.region < columns:
                cut = columns - batch.region
                view = self._view(batch, cut)
                streams, x = streams.view(rows, columns, c.hc_mult, -1)[:, cut:].flatten(0, 1), x[:, cut:]
                some = slice(0, batch.region)
            mixed = self._mix(streams, w, f"{name}.hc_attn")
            y = self._attention(x, w, role, view, some, found, select=select)
            streams, pre = expand(y.flatten(0, 1), streams, mixed), mixed.pre
            mixed = self._mix(streams, w, f"{name}.hc_ffn")
            x = norm(collapse(streams, pre), w[f"{name}.ffn_norm.weight"])
            drawn = batch.is_image[:, view.start :].flatten()
            bias = torch.where(drawn.unsqueeze(1), w[f"{name}.ffn.gate.bias_vl"], w[f"{name}.ffn.gate.bias"])
            picks = role.num_picks
            y, picked = experts(x, w, f"{name}.ffn", bias.detach(), picks, c.routed_scaling_factor, c.swiglu_limit)
            found.loads[role.layer] = torch.stack([picked[~drawn].sum(0), picked[drawn].sum(0)])
            streams, pre = expand(y, streams, mixed), mixed.pre
        self._close(found)
        found.hidden = collapse(streams, pre).view(rows, view.num, -1)
        return found

    def _mix(self, streams: torch.Tensor, w: Weights, name: str) -> Mix:
        return mix(streams, w, name, self.config.hc_eps, self.config.hc_sinkhorn_iters)

    def _view(self, batch: Batch, start: int) -> View:
        first = batch.window_from[:, start:].clamp(min=start)
        position = batch.positions[:, start:]
        return View(
            start,
            attention.window_bias(first, start, self.config.sliding_window),
            batch.lowest[:, start:],
            Turn.at(position, self.freqs),
            Turn.at(position, self.local_freqs),
            batch.sources[:, start:],
        )

    def _attention(
        self, x: torch.Tensor, w: Weights, role: LayerRole, view: View, probe: slice, found: Pass, *, select: bool
    ) -> torch.Tensor:
        """`x` [B, Q, D], normed -> [B, Q, D]."""
        c, name = self.config, f"{role.name}.attn"
        turn = view.turn if role.ratio else view.local_turn
        low, q, kv = attention.project(x, w, name, c)
        cached = found.shared if role.ratio else None
        if cached is not None and role.owns_index:
            self._close(found)
            self._pick(low.detach(), x.detach(), w, role, view, probe, found, select=select)
        near, sink = attention.window_values(kv, turn), w[f"{name}.attn_sink"]
        guided = found.guides and role.ratio == 1 and not role.owns_index
        out = attention.attend(rotate(q, turn), near, cached, view, sink, probe, guided=guided)
        return attention.output(out, w, name, c, turn)

    def _pick(
        self,
        qr: torch.Tensor,
        x: torch.Tensor,
        w: Weights,
        role: LayerRole,
        view: View,
        probe: slice,
        found: Pass,
        *,
        select: bool,
    ) -> None:
        """Say which rows the queries see; keep the scores of the probed ones, for the indexer's loss."""
        c, cached, name = self.config, found.shared, f"{role.name}.attn"
        assert cached is not None
        seen = attention.visible(view, cached.ratio, cached.rows.shape[1])

        def scores(some: slice) -> torch.Tensor:
            turn = Turn(view.turn.cos[:, some], view.turn.sin[:, some])
            return attention.index_scores(qr[:, some], x[:, some], w, name, c, turn, cached.keys)

        cached.scores = scores(probe).masked_fill(~seen[:, probe], -torch.inf)
        if select and cached.rows.shape[1] > c.index_topk:
            with torch.no_grad():
                parts = [scores(some) for some in attention.pieces(view, view.num)]
                everything = torch.cat(parts, 1)
                if role.layer == c.candidate_source_layer_id:
                    cached.candidates = attention.candidates(
                        everything, seen, c.candidate_block_size, c.candidate_topk_blocks
                    )
                elif cached.candidates is not None and role.kv_owner == c.candidate_source_layer_id:
                    seen = cached.candidates
                seen = attention.choose(everything, seen, c.index_topk)
        cached.bias = torch.where(seen, 0.0, attention.NEVER)

    def _close(self, found: Pass) -> None:
        """The loss of the indexer whose layers end here: KL from where its layers attended to what it scored."""
        cached = found.shared
        if cached is None or cached.scores is None:
            return
        mass = torch.stack(cached.mass).sum(0)
        total = mass.sum(-1, keepdim=True)
        target = mass / total.clamp_min(1e-6)
        logs = cached.scores.log_softmax(-1)
        each = torch.where(target > 0, target * (target.clamp_min(1e-9).log() - logs), 0.0).sum(-1)
        weight = (total.squeeze(-1) > 1e-3).float()
        found.index_loss.append((each * weight).sum() / weight.sum().clamp_min(1.0))
        cached.scores, cached.mass = None, []
        if cached.missed:
            total, num = torch.stack(cached.missed).sum(0)
            found.guide_loss.append(total / num.detach().clamp(min=1))
            cached.missed = []
