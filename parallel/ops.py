"""Every operation of the model, defined in plain torch: one method says what it does and does it.

    layers (model/) -> Ops -> torch        CudaOps, NpuOps (backends/) replace some of the methods

The CPU runs this class as it stands, and every replacement is tested against it. First come the
operations that layers call, then the parts that those are made of. Weights are [out, in]. Norms,
softmax, gates, the delta rule and its state are float32 whatever the dtype of the tensors.
Shapes: as in parallel/operands.py, and n, m query and key-value heads | d width of a head
"""

from __future__ import annotations

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.parallel import experts, sampling
from outrider.parallel.formats import Matrix, StackedMatrix, dequantised, row_pieces
from outrider.parallel.group import Group
from outrider.parallel.operands import (
    ExpertLayer,
    GatheredSlots,
    GdnLayer,
    PartialSum,
    PickRows,
    Rows,
    SamplingFeatures,
    SlotMemory,
    SlotSampling,
)

CHUNK_ROWS = 64
"""Prompt rows that the delta rule takes at a time."""
FEW_ROWS = 16
"""Up to so many rows a product has the weight as its left factor, which reads the weight once;
with the factors the other way round, the library first copies the weight into another layout."""


class Ops:
    """The operations. They run on the device of their tensors, and remember nothing."""

    def locate_rows(
        self,
        first: Tensor,
        counts: Tensor,
        block_table: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_rows: int,
        page_tokens: int,
        shift: int = 0,
        more: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Where the rows of a pass lie: R = num_rows of each slot, from position first + shift on.

        first, counts [B] int64, of which counts + more rows are real; block_table [B, N] int64;
        cos, sin [num_positions, rotary] float32.
        -> positions [B, R] int64, at most num_positions - 1; index [B, R] int64 = page *
        page_tokens + offset, 0 (in the null page) for padding rows; cos and sin of the positions
        [B, R, 1, rotary]; lengths [B] int64, the position after each slot's last real row.
        """
        first, counts = first + shift, counts + more
        row = torch.arange(num_rows, device=first.device)
        positions = (first.unsqueeze(1) + row).clamp_(0, cos.shape[0] - 1)
        page = (positions // page_tokens).clamp_(max=block_table.shape[1] - 1)
        index = block_table.gather(1, page) * page_tokens + positions % page_tokens
        index = index.masked_fill_(row >= counts.unsqueeze(1), 0)
        cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
        return positions, index, cos, sin, first + counts

    def embed_rms_norm(
        self, tokens: Tensor, table: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, R] int64, table [V, H] -> (rms_norm of their rows, the rows), [B, R, H]."""
        x = F.embedding(tokens, table)
        return self.rms_norm(x, scale, eps), x

    def mtp_input(
        self,
        tokens: Tensor,
        table: Tensor,
        hidden: Tensor,
        token_scale: Tensor,
        hidden_scale: Tensor,
        eps: float,
    ) -> Tensor:
        """tokens [B, R] int64, table [V, H], hidden [B, R, H] -> [B, R, 2H].

        The left half is rms_norm of the tokens' rows of the table by token_scale [H], the right
        half is rms_norm of hidden by hidden_scale [H].
        """
        left, _ = self.embed_rms_norm(tokens, table, token_scale, eps)
        return torch.cat((left, self.rms_norm(hidden, hidden_scale, eps)), -1)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x / rms(x) * scale over the last dim, in x's dtype. scale [d] or [n, d] float32."""
        wide = x.float()
        return (wide * _inverse_rms(wide, eps) * scale).to(x.dtype)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]. A weight that is stored in codes is made
        plain, in x's dtype, some rows at a time."""
        if isinstance(weight, StackedMatrix):
            return torch.cat([self.linear(x, part) for part in weight.parts], -1)
        if not isinstance(weight, Tensor):
            plain = (dequantised(part, x.dtype) for part in row_pieces(weight))
            return torch.cat([self.linear(x, part) for part in plain], -1)
        num_rows = x.numel() // x.shape[-1]
        if 1 < num_rows <= FEW_ROWS:
            return torch.mm(weight, x.reshape(num_rows, -1).t()).t().reshape(*x.shape[:-1], -1)
        return F.linear(x, weight)

    def linear_swiglu(self, x: Tensor, gate_up: Matrix) -> Tensor:
        """x [..., in], gate_up [2i, in] = [gate; up] -> swiglu(linear(x, gate_up)) [..., i]."""
        return self.swiglu(self.linear(x, gate_up))

    def experts(self, x: Tensor, layer: ExpertLayer) -> Tensor:
        """This rank's part of a mixture of experts, x [.., H] -> [.., H].

        Each row's result is the weighted sum of its experts' swiglu MLPs, as far as this rank holds
        them, and of the shared expert's, times the sigmoid of its gate. Sums are float32.
        """
        rows, add_up = x.reshape(-1, x.shape[-1]), partial(experts.routed, mlp=self._mlp)
        return experts.mixture(rows, layer, self._mlp, add_up).view(x.shape)

    def _mlp(self, x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
        return self.linear(self.linear_swiglu(x, gate_up), down)

    def linear_part(self, x: Tensor, weight: Matrix, group: Group) -> PartialSum:
        """linear(x, weight) as this rank's part of a sum over the ranks of `group`.

        sum_add_rms_norm of the result is the next call over the group that sums. A backend may
        start sending the part here; the result says so.
        """
        return PartialSum(self.linear(x, weight), group)

    def sum_add_rms_norm(
        self, part: PartialSum, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """add_rms_norm of the sum of `part` over the ranks of its group.

        The norm, the first result, is valid until the next such call. The second result may hold
        only some rows of residual + sum, other ones on each rank: it is good for nothing but to be
        the `residual` of a next call with as many rows.
        """
        return self.add_rms_norm(part.group.all_reduce(part.values), residual, scale, eps)

    def qk_norm_rope_write(
        self,
        qk: Tensor,
        v: Tensor,
        scale: Tensor,
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        rows: Rows,
    ) -> Tensor:
        """Norm q and k by head, rotate them, write k and v to their pages; -> q [B, R, n, d].

        qk [B, R, n + m, d], the query heads first; v [B, R, m, d]; scale [n + m, d] float32; pages
        [P, page_tokens, m, d]. rows.cos and rows.sin rotate the first `rotary` elements of a head,
        each of their left half with the one `rotary / 2` to its right (NeoX's layout);
        rows.kv_index says where k and v are written.
        """
        num_kv, width = v.shape[2], rows.cos.shape[-1]
        qk = self.rms_norm(qk, scale, eps)
        turned, rest = qk.split_with_sizes((width, qk.shape[-1] - width), -1)
        left, right = turned.chunk(2, -1)
        turned = turned * rows.cos + torch.cat((-right, left), -1) * rows.sin
        qk = torch.cat((turned.to(qk.dtype), rest), -1)
        q, k = qk.split_with_sizes((qk.shape[2] - num_kv, num_kv), 2)
        index = rows.kv_index.reshape(-1)
        for pages, new in ((k_pages, k), (v_pages, v)):
            pages.flatten(0, 1).index_copy_(0, index, new.flatten(0, 1))
        return q

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, rows: Rows, gate: Tensor
    ) -> Tensor:
        """Causal attention over pages, with scale d^-0.5 and softmax in float32; times
        sigmoid(gate).

        q [B, R, n, d]; pages [P, page_tokens, m, d]; gate [B, R, n * d] -> [B, R, n * d]. A row
        sees the keys at positions up to its own and below its slot's length. What lies elsewhere in
        the pages, NaN included, has no influence.
        """
        num_heads, d = q.shape[2:]
        num_kv = k_pages.shape[2]
        k = k_pages[rows.block_table].flatten(1, 2).permute(0, 2, 3, 1)  # [B, m, d, L]
        v = v_pages[rows.block_table].flatten(1, 2).transpose(1, 2)  # [B, m, L, d]
        key = torch.arange(v.shape[2], device=q.device)
        stale = key >= rows.lengths.unsqueeze(-1)  # [B, L]
        unseen = (key > rows.positions.unsqueeze(-1)) | stale.unsqueeze(1)  # [B, R, L]
        v = v.masked_fill(stale[:, None, :, None], 0.0)
        grouped = q.unflatten(2, (num_kv, num_heads // num_kv)).permute(0, 2, 3, 1, 4)
        scores = (grouped.flatten(2, 3) @ k).float() * d**-0.5  # [B, m, g*R, L]
        scores = scores.unflatten(2, grouped.shape[2:4])
        scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).flatten(2, 3)
        out = (weights @ v).unflatten(2, grouped.shape[2:4])  # [B, m, g, R, d]
        return out.permute(0, 3, 1, 2, 4).flatten(2) * torch.sigmoid(gate)

    def gdn_verify(
        self, proj: Tensor, layer: GdnLayer, slots: Tensor, fold: Tensor, max_fold: int
    ) -> Tensor:
        """A delta net between its projections, for rows of which only a prefix may be kept.

        proj [B, R, C + h Dv + 2 h] = [q k v | z | b | a]; slots, fold [B] int64; no fold[b] is
        larger than max_fold. First the factors of fold[b] rows of the last pass are folded into the
        state; then the R rows run, and leave their factors and their conv window in `layer`.
        -> [B, R, h Dv].
        """
        num_rows, (heads, dv) = proj.shape[1], (layer.num_v_heads, layer.head_v_dim)
        keys = (layer.num_k_heads, layer.head_k_dim)
        u, z, b, a = proj.split_with_sizes(layer.widths, -1)
        taps = torch.arange(layer.conv_weight.shape[0] - 1, device=proj.device)
        before = (slots * layer.conv.shape[1] + fold).unsqueeze(1) + taps
        window = torch.cat((layer.conv.flatten(0, 1)[before], u), 1)
        y = self.causal_conv(window, layer.conv_weight, num_rows)
        qk, v = y.split_with_sizes((y.shape[-1] - heads * dv, heads * dv), -1)
        qk, v = self.gdn_qk_norm(qk.unflatten(-1, (2, *keys))), v.unflatten(-1, (heads, dv)).float()
        state = layer.state.index_select(0, slots)
        if max_fold:
            pending = layer.factors[:, :max_fold].index_select(0, slots)
            k, delta, decay = pending.split_with_sizes((keys[0] * keys[1], heads * dv, heads), -1)
            k, delta = k.unflatten(-1, keys), delta.unflatten(-1, (heads, dv))
            for part in _parts(max_fold, layer):
                some = (fold - part.start).clamp(0, part.stop - part.start)
                state = self.gdn_fold(state, k[:, part], delta[:, part], decay[:, part], some)
            layer.state.index_copy_(0, slots, state)
        results = []
        for part in _parts(num_rows, layer):
            g, beta = self.gdn_gates(a[:, part], b[:, part], layer.rate, layer.dt_bias)
            out, delta = self.gdn_rows(qk[:, part], v[:, part], g, beta, state)
            results.append((out, delta, g))
            if part.stop < num_rows:
                state = self.gdn_fold(state, qk[:, part, 1], delta, g, torch.ones_like(fold))
        out, delta, g = (torch.cat(parts, 1) for parts in zip(*results))
        factors = torch.cat((qk[:, :, 1].flatten(2), delta.flatten(2), g), -1)
        layer.factors[:, :num_rows].index_copy_(0, slots, factors)
        layer.conv[:, : window.shape[1]].index_copy_(0, slots, window)
        z = z.unflatten(-1, (heads, dv))
        out = out.to(z.dtype)
        return self.gated_rms_norm(out, z, layer.norm_weight, layer.eps, layer.gate).flatten(2)

    def gdn_prefill(self, proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> Tensor:
        """As gdn_verify for prompt rows, of which the first counts[b] [B] int64 are kept at once.

        No row waits to be folded before or after: `fold` of these slots is 0.
        """
        qk, v, g, beta, window = self._prefill_inputs(proj, layer, slots)
        state, outs = layer.state.index_select(0, slots), []
        for start in range(0, proj.shape[1], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            qk_part, g_part = qk[:, part], g[:, part]
            out, delta = self.gdn_rows(qk_part, v[:, part], g_part, beta[:, part], state)
            real = (counts - start).clamp(0, qk_part.shape[1])
            state = self.gdn_fold(state, qk_part[:, :, 1], delta, g_part, real)
            outs.append(out)
        return self._prefill_end(torch.cat(outs, 1), proj, layer, slots, counts, window, state)

    def head_ids(
        self, hidden: Tensor, head: Tensor, scales: Tensor | None, first_id: int, group: Group
    ) -> Tensor:
        """The id [N] int64 of each row's best logit, over all ranks' shares of the head.

        hidden, head and first_id as in head_pair. scales [v]: as in head_pair_fp8, or None.
        """
        if scales is None:
            pair = self.head_pair(hidden, head, first_id)
        else:
            pair = self.head_pair_fp8(hidden, head, scales, first_id)
        return self.choose_pair(group.all_gather(pair))

    def pick_ids(
        self,
        hidden: Tensor,
        head: Tensor,
        scales: Tensor | None,
        first_id: int,
        group: Group,
        rows: PickRows,
        by_slot: SlotSampling,
        features: SamplingFeatures,
        *,
        exact: bool = True,
    ) -> tuple[Tensor, ...]:
        """Pick a token for each row as its slot's request says (parallel/sampling.py).

        hidden [B, R, H]; head, scales and first_id as in head_ids. -> ids [B, R] int64, the same on
        every rank. With features.logprobs, ids and log probabilities of the unedited logits follow
        (sampling.log_probs), [B, R, 1 + n]. Without `exact` the filters are replaced by a cheaper
        one (sampling.near_top), and masks do not count: for drafts, which the target judges.
        """
        logits = self.head_logits(hidden, head, scales).float()
        num_slots, num_rows, width = logits.shape
        edited = logits
        if features.edited:
            edited = sampling.edit(logits, rows, by_slot, first_id)
        if features.masked and exact:
            edited = sampling.mask(edited, rows.slots, by_slot)
        slots = rows.slots.repeat_interleave(num_rows)
        x = edited.flatten(0, 1) * by_slot.scale[slots].unsqueeze(1)
        noised = x
        if features.drawn:
            noise, end = rows.noise, rows.shift + num_rows
            if noise is None:
                noise = sampling.noise_after(rows.slots, rows.last, end, by_slot, first_id)
            noise = noise[:, rows.shift : end].flatten(0, 1)
            noised = torch.where(by_slot.drawn[slots].unsqueeze(1), x + noise, x)
        if features.filtered and exact:
            keys = sampling.order_keys(x, sampling.ids_from(first_id, width, x.device))
            first = sampling.kept_from(x, keys, slots, by_slot, group)
            noised = noised.masked_fill(keys < first.unsqueeze(1), float("-inf"))
        elif features.filtered:
            near = sampling.near_top(x, slots, by_slot, group)
            noised = noised.masked_fill(~near, float("-inf"))
        tokens = self.choose_pair(group.all_gather(self.top_pair(noised, first_id)))
        picked = tokens.view(num_slots, num_rows)
        if features.logprobs is None:
            return (picked,)
        reported = sampling.log_probs(
            logits.flatten(0, 1), tokens, features.logprobs, first_id, group
        )
        return (picked, *(part.unflatten(0, (num_slots, num_rows)) for part in reported))

    def noise_ahead(
        self, slots: Tensor, last: Tensor, num_rows: int, by_slot: SlotSampling, first_id: int
    ) -> Tensor | None:
        """PickRows.noise for the passes of an iteration, whose drafts and the rows that judge them
        have the same: as sampling.noise_after. None where pick_ids makes it as it goes."""
        return sampling.noise_after(slots, last, num_rows, by_slot, first_id)

    def count_tokens(
        self, history: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor, first_id: int
    ) -> None:
        """Count the first counts[b] of the tokens [B, R] int64 in SlotSampling.history [S, v] of
        slots[b], as far as they are among its ids, which start at first_id."""
        local = tokens - first_id
        row = torch.arange(tokens.shape[1], device=tokens.device)
        counted = (row < counts.unsqueeze(1)) & (local >= 0) & (local < history.shape[1])
        index = slots.unsqueeze(1) * history.shape[1] + local
        added = counted.to(history.dtype) << sampling.COUNT_SHIFT
        history.view(-1).scatter_add_(0, index.masked_fill(~counted, 0).flatten(), added.flatten())

    def gather_slots(
        self, slots: Tensor, memory: SlotMemory, table: Tensor, width: int
    ) -> GatheredSlots:
        """What the memory holds for the slots [B] int64, and the first `width` rows of fresh and
        hidden. table [S, N]: the block tables of all slots, or the first pages of each."""
        length, kept = memory.length[slots], memory.kept[slots]
        return GatheredSlots(
            length=length,
            last=memory.last[slots],
            kept=kept,
            fold=memory.fold[slots],
            start=length - kept,
            fresh=memory.fresh[slots, :width],
            hidden=memory.hidden[slots, :width],
            table=table[slots],
        )

    def accept_commit(
        self,
        slots: Tensor,
        drafts: Tensor,
        targets: Tensor,
        limits: Tensor,
        hidden: Tensor,
        memory: SlotMemory,
    ) -> Tensor:
        """Keep the drafts that equal the target's tokens, and advance the slots by what is kept.

        slots, limits [B] int64, the drafts that each slot takes; drafts [B, K] and targets [B, R]
        int64, R = K + 1; hidden [B, R, H]. -> kept [B] int64, 1 + the length of the prefix on which
        both agree, at most limits + 1. Slots are distinct, except for the last one of the memory:
        it is padding, which a batch may hold several times and nobody reads. Its length stays 0, so
        that its rows never attend to more keys than their own.
        """
        num_drafts, rows = drafts.shape[1], targets.shape[1]
        offered = torch.arange(num_drafts, device=drafts.device) < limits.unsqueeze(1)
        agrees = (drafts == targets[:, :num_drafts]) & offered
        kept = 1 + agrees.to(torch.int64).cumprod(1).sum(1)
        memory.length[slots] += kept
        memory.length[-1:].zero_()
        memory.kept[slots] = kept
        memory.fold[slots] = kept
        memory.last[slots] = targets.gather(1, (kept - 1).unsqueeze(1)).squeeze(1)
        memory.fresh[slots, :rows] = targets
        memory.hidden[slots, :rows] = hidden
        return kept

    # The parts that the operations above are made of.

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """-> (rms_norm(x + residual), x + residual)."""
        total = x + residual
        return self.rms_norm(total, scale, eps), total

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        """weight * x / rms(x) * act(z) in z's dtype: the norm at the end of a delta net.

        weight [Dv] float32; act is the gate, "silu" or "sigmoid".
        """
        wide = x.float()
        act = F.silu(z.float()) if gate == "silu" else torch.sigmoid(z.float())
        return (wide * _inverse_rms(wide, eps) * weight * act).to(z.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2i] = [gate | up] -> silu(gate) * up [..., i]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def _prefill_inputs(
        self, proj: Tensor, layer: GdnLayer, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """-> qk, v, g, beta of the rows, and their conv window [B, W-1+R, C]."""
        values = (layer.num_v_heads, layer.head_v_dim)
        u, _, b, a = proj.split_with_sizes(layer.widths, -1)
        before = layer.conv_weight.shape[0] - 1
        window = torch.cat((layer.conv[:, :before].index_select(0, slots), u), 1)
        y = self.causal_conv(window, layer.conv_weight, u.shape[1])
        qk, v = y.split_with_sizes((y.shape[-1] - values[0] * values[1], values[0] * values[1]), -1)
        qk = self.gdn_qk_norm(qk.unflatten(-1, (2, layer.num_k_heads, layer.head_k_dim)))
        g, beta = self.gdn_gates(a, b, layer.rate, layer.dt_bias)
        return qk, v.unflatten(-1, values).float(), g, beta, window

    def _prefill_end(
        self,
        out: Tensor,
        proj: Tensor,
        layer: GdnLayer,
        slots: Tensor,
        counts: Tensor,
        window: Tensor,
        state: Tensor,
    ) -> Tensor:
        """Store the state and the W-1 rows before the next one; norm and gate out [B, R, h, Dv]."""
        before = layer.conv_weight.shape[0] - 1
        layer.state.index_copy_(0, slots, state)
        index = counts[:, None] + torch.arange(before, device=proj.device)
        last = window.gather(1, index.unsqueeze(-1).expand(-1, -1, window.shape[-1]))
        layer.conv[:, :before].index_copy_(0, slots, last)
        z = proj.split_with_sizes(layer.widths, -1)[1].unflatten(-1, out.shape[2:])
        out = out.to(z.dtype)
        return self.gated_rms_norm(out, z, layer.norm_weight, layer.eps, layer.gate).flatten(2)

    def causal_conv(self, window: Tensor, weight: Tensor, rows: int) -> Tensor:
        """Depthwise conv and SiLU: window [B, W-1+rows, C], weight [W, C] -> [B, rows, C]."""
        taps = window.float()
        w = weight.float()
        y = taps[:, :rows] * w[0]
        for j in range(1, w.shape[0]):
            y = torch.addcmul(y, taps[:, j : j + rows], w[j])
        return F.silu(y).to(window.dtype)

    def gdn_gates(
        self, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """a, b [B, R, h]; rate [h] = -exp(A_log) -> g = rate * softplus(a + dt_bias), the logarithm
        of a decay and never above 0, and beta = sigmoid(b); both float32."""
        return F.softplus(a.float() + dt_bias) * rate, torch.sigmoid(b.float())

    def gdn_qk_norm(self, qk: Tensor) -> Tensor:
        """qk [B, R, 2, k, Dk] -> each vector scaled to length 1 in float32 (1e-6 is added to the
        sum of squares under the root)."""
        qk = qk.float()
        return qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-6)

    def gdn_rows(
        self, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule over R rows from `state`, in chunk form.

        qk [B, R, 2, k, Dk]; v [B, R, h, Dv]; g, beta [B, R, h]; state [B, h, Dk, Dv]; float32.
        -> o [B, R, h, Dv], read with q * Dk^-0.5, and delta [B, R, h, Dv]. With k and g, delta is
        what a row adds to the state. That of a row depends on no later row, so any prefix of the
        rows can be folded afterwards. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks",
        2024.
        """
        num_slots, rows, _, key_heads, dk = qk.shape
        repeat = v.shape[2] // key_heads
        v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2).unsqueeze(-1)
        # The q rows, then the k rows, by value head: one product with the state, one with the keys.
        qk = qk.permute(0, 3, 2, 1, 4).unsqueeze(2).expand(-1, -1, repeat, -1, -1, -1)
        qk = qk.reshape(num_slots, key_heads * repeat, 2 * rows, dk)
        k = qk[:, :, rows:]
        read_q, read_k = (qk @ state).chunk(2, 2)  # [B, h, R, Dv]
        dot_q, dot_k = (qk @ k.transpose(-1, -2)).chunk(2, 2)  # [B, h, R, R]
        grown = g.cumsum(-1).exp().unsqueeze(-1)
        delta = beta * (v - grown * read_k)
        out = grown * read_q
        if rows == 1:
            out = out + dot_q * delta
        else:
            sums = (g @ _between(rows, g.device)).unflatten(-1, (rows, rows))
            between = sums.exp() * _causal(rows, g.device)
            mixed = dot_k * between * beta
            delta = self.solve_unit_lower(mixed, delta)
            out = out + (dot_q * between) @ delta
        return (out * dk**-0.5).transpose(1, 2), delta.transpose(1, 2)

    def solve_unit_lower(self, lower: Tensor, right: Tensor) -> Tensor:
        """x of L x = right [..., R, Dv], where L [..., R, R] has 1 on its diagonal, `lower` below
        it and 0 above it; what `lower` holds elsewhere is ignored."""
        return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)

    def gdn_fold(self, state: Tensor, k: Tensor, delta: Tensor, g: Tensor, fold: Tensor) -> Tensor:
        """Advance `state` by the factors of the first fold[b] rows; 0 rows leave it as it is.

        S_m = e^{c_m} S_0 + sum_{t <= m} e^{c_m - c_t} k_t delta_t^T, where c is the running sum of
        g. state [B, h, Dk, Dv]; k [B, R, k, Dk]; delta [B, R, h, Dv]; g [B, R, h]; fold [B] int64.
        """
        rows, key_heads = k.shape[1:3]
        alive = (torch.arange(rows, device=k.device) < fold.unsqueeze(-1)).unsqueeze(-1)
        g = g * alive  # [B, R, h]
        after = (
            _causal(rows, g.device).t() @ g - g
        ).exp() * alive  # decay from each row to the last one that is folded
        weighted = (delta * after.unsqueeze(-1)).transpose(1, 2)  # [B, h, R, Dv]
        keys = k.permute(0, 2, 3, 1).unsqueeze(2)  # [B, k, 1, Dk, R]
        keys = keys.expand(-1, -1, delta.shape[2] // key_heads, -1, -1).flatten(1, 2)
        return state * g.sum(1).exp()[..., None, None] + keys @ weighted

    def head_logits(self, hidden: Tensor, head: Tensor, scales: Tensor | None) -> Tensor:
        """hidden [.., H], head [v, H], scales [v] as in head_pair_fp8 or None -> [.., v]."""
        if scales is None:
            return self.linear(hidden, head)
        return (self.linear(hidden.float(), head.float()) * scales).to(hidden.dtype)

    def head_pair(self, hidden: Tensor, head: Tensor, first_id: int) -> Tensor:
        """hidden [N, H], head [v, H] of the ids from first_id on -> top_pair of its logits."""
        return self.top_pair(self.head_logits(hidden, head, None), first_id)

    def head_pair_fp8(self, hidden: Tensor, head: Tensor, scales: Tensor, first_id: int) -> Tensor:
        """head_pair of head [v, H] float8_e4m3fn, each row of it times its scale [v] float32."""
        return self.top_pair(self.head_logits(hidden, head, scales), first_id)

    def top_pair(self, logits: Tensor, first_id: int) -> Tensor:
        """logits [N, v] of the ids from first_id on -> the best of each row as a pair [N, 2] int32:
        the bits of its logit as float32, and its id, the smallest that has this logit."""
        value, index = logits.float().max(-1)
        return torch.stack((value.view(torch.int32), (index + first_id).to(torch.int32)), -1)

    def choose_pair(self, gathered: Tensor) -> Tensor:
        """The pairs of all ranks [size, N, 2] -> the id [N] int64 of each row's largest logit, the
        smallest such id. The ids of a rank are below those of the next."""
        bits, ids = gathered.unbind(-1)  # [size, N] each
        values = bits.contiguous().view(torch.float32)
        # The first rank that has the largest logit also has the smallest of the ids that have it.
        winner = (values == values.amax(0, keepdim=True)).to(torch.int8).argmax(0, keepdim=True)
        return ids.gather(0, winner).squeeze(0).to(torch.int64)


def _parts(num_rows: int, layer: GdnLayer) -> list[slice]:
    """The rows that the delta rule takes at a time: all of them, or one after another."""
    step = 1 if layer.rows_in_turn else num_rows
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dim. On CPUs this takes half the time of torch's own
    rms_norm."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@cache
def _number(value: float, device: torch.device) -> Tensor:
    """A float32 scalar on the device."""
    return torch.tensor(value, dtype=torch.float32, device=device)


@cache
def _causal(rows: int, device: torch.device) -> Tensor:
    """[R, R] float32: 1 where column <= row, else 0."""
    return torch.ones(rows, rows, device=device).tril()


@cache
def _between(rows: int, device: torch.device) -> Tensor:
    """[R, R * R] float32 of 0 and 1: g [.., R] times it holds, at i * R + j, the sum of g over the
    rows j+1..i, added term by term.

    Differences of running sums would lose all digits where a decay is strong.
    """
    row = torch.arange(rows, device=device)
    inside = (row[:, None, None] <= row[:, None]) & (row[:, None, None] > row)
    return inside.float().flatten(1)
