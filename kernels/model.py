"""The backbone: embedding, blocks, head; and the loader of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kernels.attention import Attention
from kernels.batch import Batch, Segment
from kernels.block import Block
from kernels.cache import StatePool
from kernels.checkpoint import Checkpoint, CheckpointError
from kernels.config import ModelConfig
from kernels.draft import Drafter
from kernels.engram import Engram
from kernels.group import Group
from kernels.layout import Layout, check
from kernels.moe import MoE
from kernels.ops.engram import hash_tables
from kernels.ops.linear import by_columns, linear
from kernels.ops.mix import collapse
from kernels.ops.rope import Rotation, frequencies
from kernels.ops.rounding import keep, rms_norm, to_bf16
from kernels.replay import decoder_segments
from kernels.step import Step
from kernels.vocabulary import TokenMap, load_token_map

ComputeDtype = Literal["fp32", "bf16"]


class Model:
    """A loaded V4.1 text backbone; immutable, so one instance may serve any number of pools.

    `compute_dtype` "bf16" rounds activations where the published model does; "fp32" rounds none of them, while every
    quantise-dequantise step stays: the tighter oracle, and faster on a CPU. `drafter` is None without draft stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        token_map: TokenMap | None,
        compute_dtype: ComputeDtype,
        group: Group | None = None,
    ) -> None:
        self.config = config
        self.round = to_bf16 if compute_dtype == "bf16" else keep
        c, self.token_map = config, token_map
        if token_map is not None and c.image_token_id is not None:
            # Images break n-grams: to Engram they are like what lies before the start.
            ids = token_map.ids.clone()
            ids[c.image_token_id] = -1
            self.token_map = token_map._replace(ids=ids)
        self.embed = checkpoint.tensor("embed.weight", c.vocab_size, c.hidden_size)
        self.norm = checkpoint.tensor("norm.weight", c.hidden_size)
        self.head = by_columns(checkpoint.tensor("head.weight", c.vocab_size, c.hidden_size))
        self.blocks = [
            Block(c, role, checkpoint, self.round, Attention(c, role, checkpoint, self.round), group)
            for role in c.layers
        ]
        # A checkpoint may come without its draft stages, whatever its configuration says.
        drafts = c.num_nextn_predict_layers > 0 and "mtp.0.main_norm.weight" in checkpoint
        self.drafter = Drafter(c, checkpoint, self.embed, self.head, self.round, group) if drafts else None
        tables = hash_tables(
            c.engram_layer_ids,
            c.engram_max_ngram_size,
            c.engram_n_heads,
            c.engram_vocab_size,
            c.engram_compressed_vocab_size,
        )
        self.engrams: dict[int, Engram] = {}
        for role in c.layers:
            if role.engram is not None:
                table, want = tables[role.engram], c.engram_num_embeddings[role.engram]
                if table.num_rows != want:
                    raise CheckpointError(
                        f"config.json: engram_num_embeddings of layer {role.layer} is {want},"
                        f" but its primes add up to {table.num_rows}"
                    )
                self.engrams[role.layer] = Engram(c, role, table, checkpoint, self.round)
        self.device = checkpoint.device
        self.window_freqs = frequencies(c.qk_rope_head_dim, c.rope_theta, None).to(self.device)
        self.compressed_freqs = frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling).to(self.device)

    @np.errstate(all="ignore")  # weights that are no good show in the logits, which sampling refuses
    @torch.inference_mode()
    def forward(self, batch: Batch, pool: StatePool, trace: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Compute the batch, write its state into `pool` (whose lengths advance), return the wanted rows.

        Returns fp32 `[len(batch.rows), hidden_size]`: the collapsed residual before the final norm and head.
        Every row is bitwise the same whatever else is in the batch and however the prompt is cut into segments.
        Rows of a prompt that bounded replay keeps out of the decoder (`StatePool.plan_replay`) come back NaN.
        Positions whose token is the image token are routed as images and are dead to Engram; their embeddings are those
        of the batch, or where it has none the token's own.
        `trace`, when given, is filled with intermediate tensors under the names of the golden data.
        Raises ValueError when a segment does not continue its slot's state or exceeds `pool.max_tokens`, or a token
        is outside the vocabulary; the pool is then as it was. Raises GroupError when a rank of the group is gone: no
        length has advanced then, and only rows behind them were written.
        """
        if bool(((batch.tokens < 0) | (batch.tokens >= self.config.vocab_size)).any()):
            raise ValueError(f"token ids must be in [0, {self.config.vocab_size})")
        check(batch.segments, pool)
        layout = Layout(batch.segments, pool)
        position = layout.host_positions[: layout.num_rows]
        pool.tokens[layout.slots, position] = batch.tokens
        step = Step(
            layout,
            pool,
            Rotation.at(layout.positions, self.window_freqs),
            Rotation.at(layout.positions, self.compressed_freqs),
            trace,
            self._history(layout, pool) if self.engrams else None,
        )
        ids = torch.nn.functional.pad(batch.tokens, (0, layout.padded - layout.num_rows))
        if self.config.image_token_id is not None:
            images = ids == self.config.image_token_id
            step.images = images.to(self.device) if bool(images.any()) else None
        rows = self.embed[ids.to(self.device)]
        for first, values in batch.images:
            rows[first : first + len(values)] = self.round(values.to(self.device))
        num = self.config.hc_mult
        streams = rows.unsqueeze(1).repeat(1, num, 1)
        step.record("embed_expanded_in", streams)
        pre = torch.zeros(layout.padded, num, device=self.device)
        pre[:, 0] = 1.0
        streams, pre = self._layers(streams, pre, batch.segments, step)
        if self.drafter is not None and step.taps and (step.rows is None or len(step.rows)):
            assert pool.taps is not None
            pool.taps.keep(step.taps, step.layout.taps, self.drafter.observe)
        for segment in batch.segments:
            pool.advance(segment.slot, segment.num_tokens)
        return self._wanted(torch.tensor(batch.rows), streams, pre, step)

    def _layers(
        self, streams: torch.Tensor, pre: torch.Tensor, segments: Sequence[Segment], step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All blocks; behind the last KV owner's compressor only the rows that bounded replay wants remain."""
        pool = step.pool
        starts = [pool.starts(segment.slot) for segment in segments]
        decoder = decoder_segments(segments, starts, self.config.sliding_window)
        tapped = self.config.dspark_target_layer_ids if self.drafter is not None and pool.taps is not None else ()
        for block in self.blocks:
            engram = self.engrams.get(block.role.layer)
            if engram is not None and step.history is not None and self.token_map is not None:
                streams = engram.forward(streams, step.history, self.token_map.pad)
                step.record(f"{block.role.name}.in_after_engram", streams)
            if block.role.layer in tapped:
                step.taps.append(streams)
            projected = block.project(streams, pre, step)
            if decoder is not None and block.role.layer == self.config.first_decoder_layer:
                rows = step.narrow(decoder)
                if not decoder:
                    self.serve(block.role.layer)
                    break
                streams, pre, projected = streams[rows], pre[rows], [part[rows] for part in projected]
            streams, pre = block.forward(streams, projected, step)
        return streams, pre

    @property
    def moes(self) -> list[MoE]:
        """Of the layers, then of the draft stages."""
        stages = [] if self.drafter is None else self.drafter.stages
        return [block.moe for block in (*self.blocks, *stages)]

    @torch.inference_mode()
    def serve(self, first: int = 0) -> None:
        """Take part in a `forward` of other ranks, from layer `first` on. Without a group there is nothing to do."""
        for block in self.blocks[first:]:
            block.moe.experts.serve()

    def _wanted(self, rows: torch.Tensor, streams: torch.Tensor, pre: torch.Tensor, step: Step) -> torch.Tensor:
        """Hidden state of some batch rows, NaN for those that did not go through the decoder."""
        if step.rows is None:
            rows = rows.to(self.device)
            return collapse(streams[rows], pre[rows], self.round)
        hidden = torch.full((len(rows), self.config.hidden_size), torch.nan, device=self.device)
        there = torch.isin(rows, step.rows)
        if bool(there.any()):
            place = torch.searchsorted(step.rows, rows[there]).to(self.device)
            hidden[there.to(self.device)] = collapse(streams[place], pre[place], self.round)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden_size]` rows of `forward` -> `[n, vocab_size]` fp32, each row independent of the others."""
        return linear(rms_norm(hidden, self.norm, self.config.rms_norm_eps, self.round), self.head)

    def _history(self, layout: Layout, pool: StatePool) -> torch.Tensor:
        """Compressed ids of each row's last tokens, newest first: [padded rows, n] on the host; -1 before the start and
        for images."""
        assert self.token_map is not None
        sources = layout.host_positions.unsqueeze(1) - torch.arange(self.config.engram_max_ngram_size)
        slots = torch.nn.functional.pad(layout.slots, (0, layout.padded - layout.num_rows)).unsqueeze(1)
        ids = self.token_map.ids[pool.tokens[slots, sources.clamp(min=0)]]
        return torch.where(sources >= 0, ids, -1)


def load_model(
    folder: str | Path, *, compute_dtype: ComputeDtype = "fp32", device: str = "cpu", group: Group | None = None
) -> Model:
    """Load a checkpoint folder in the official layout, after holding all its headers against its configuration.

    device: "cpu" or a CUDA device, where weights stay quantised as they are stored; Engram's tables stay on the host.
    group: its ranks share the experts, and make the same passes at the same time, `serve` where they have no rows.

    Raises ConfigError (a ValueError) for config.json and CheckpointError (a ValueError) for everything else.
    """
    config = ModelConfig.from_folder(folder)
    token_map = load_token_map(folder, config) if config.engram_layer_ids else None
    checkpoint = Checkpoint(folder, torch.device(device))
    checkpoint.verify(config)
    return Model(config, checkpoint, token_map, compute_dtype, group)
