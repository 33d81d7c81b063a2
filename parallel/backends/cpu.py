"""Every operation in plain torch: the definition that the other backends are compared with.

    Ops (parallel/device.py says what each does) -> CpuOps (here it is written out)

Float32 where the model says so: norms, softmax, gates, the delta rule and its state.
Shapes as in parallel/device.py; no operation remembers anything.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.parallel.device import GatheredSlots, GdnLayer, SlotMemory
from outrider.parallel.group import Group

CHUNK_ROWS = 64
"""Prompt rows that the delta rule takes at a time."""
FEW_ROWS = 16
"""Up to here the weight is the left factor: it streams once, where the other order repacks it."""


class CpuOps:
    """The CPU backend; see parallel.device.Ops for shapes and meaning."""

    def place_rows(
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
        first, counts = first + shift, counts + more
        row = torch.arange(num_rows, device=first.device)
        positions = (first.unsqueeze(1) + row).clamp_(0, cos.shape[0] - 1)
        page = (positions // page_tokens).clamp_(max=block_table.shape[1] - 1)
        index = block_table.gather(1, page) * page_tokens + positions % page_tokens
        index = index.masked_fill_(row >= counts.unsqueeze(1), 0)
        cos, sin = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
        return positions, index, cos, sin, first + counts

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        if 1 < num_rows <= FEW_ROWS:
            return torch.mm(weight, x.reshape(num_rows, -1).t()).t().reshape(*x.shape[:-1], -1)
        return F.linear(x, weight)

    def linear_part(self, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        return self.linear(x, weight)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * _inverse_rms(wide, eps) * scale).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, scale, eps), total

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, scale: Tensor, eps: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        return self.add_rms_norm(group.all_reduce(part), residual, scale, eps)

    def embed_rms_norm(
        self, tokens: Tensor, table: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
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
        left, _ = self.embed_rms_norm(tokens, table, token_scale, eps)
        return torch.cat((left, self.rms_norm(hidden, hidden_scale, eps)), -1)

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        wide = x.float()
        act = F.silu(z.float()) if gate == "silu" else torch.sigmoid(z.float())
        return (wide * _inverse_rms(wide, eps) * weight * act).to(z.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def linear_swiglu(self, x: Tensor, gate_up: Tensor) -> Tensor:
        return self.swiglu(self.linear(x, gate_up))

    def qk_norm_rope_write(
        self,
        qk: Tensor,
        v: Tensor,
        scale: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        k_pages: Tensor,
        v_pages: Tensor,
        index: Tensor,
    ) -> Tensor:
        num_kv, width = v.shape[2], cos.shape[-1]
        qk = self.rms_norm(qk, scale, eps)
        turned, rest = qk.split_with_sizes((width, qk.shape[-1] - width), -1)
        left, right = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-right, left), -1) * sin
        qk = torch.cat((turned.to(qk.dtype), rest), -1)
        q, k = qk.split_with_sizes((qk.shape[2] - num_kv, num_kv), 2)
        for pages, rows in ((k_pages, k), (v_pages, v)):
            pages.flatten(0, 1).index_copy_(0, index.reshape(-1), rows.flatten(0, 1))
        return q

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        positions: Tensor,
        lengths: Tensor,
        gate: Tensor,
        reach: list[int] | None = None,
    ) -> Tensor:
        num_heads, d = q.shape[2:]
        num_kv = k_pages.shape[2]
        k = k_pages[block_table].flatten(1, 2).permute(0, 2, 3, 1)  # [B, m, d, L]
        v = v_pages[block_table].flatten(1, 2).transpose(1, 2)  # [B, m, L, d]
        key = torch.arange(v.shape[2], device=q.device)
        stale = key >= lengths.unsqueeze(-1)  # [B, L]
        unseen = (key > positions.unsqueeze(-1)) | stale.unsqueeze(1)  # [B, R, L]
        v = v.masked_fill(stale[:, None, :, None], 0.0)
        grouped = q.unflatten(2, (num_kv, num_heads // num_kv)).permute(0, 2, 3, 1, 4)
        scores = (grouped.flatten(2, 3) @ k).float() * d**-0.5  # [B, m, g*R, L]
        scores = scores.unflatten(2, grouped.shape[2:4])
        scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype).flatten(2, 3)
        out = (weights @ v).unflatten(2, grouped.shape[2:4])  # [B, m, g, R, d]
        return out.permute(0, 3, 1, 2, 4).flatten(2) * torch.sigmoid(gate)

    def gdn_verify(
        self, proj: Tensor, layer: GdnLayer, slots: Tensor, kept: Tensor, waiting: int
    ) -> Tensor:
        rows, (heads, dv) = proj.shape[1], (layer.num_v_heads, layer.head_v_dim)
        keys = (layer.num_k_heads, layer.head_k_dim)
        u, z, b, a = proj.split_with_sizes(layer.widths, -1)
        taps = torch.arange(layer.conv_weight.shape[0] - 1, device=proj.device)
        before = (slots * layer.conv.shape[1] + kept).unsqueeze(1) + taps
        window = torch.cat((layer.conv.flatten(0, 1)[before], u), 1)
        y = self.causal_conv(window, layer.conv_weight, rows)
        qk, v = y.split_with_sizes((y.shape[-1] - heads * dv, heads * dv), -1)
        qk, v = self.gdn_qk_norm(qk.unflatten(-1, (2, *keys))), v.unflatten(-1, (heads, dv)).float()
        g, beta = self.gdn_gates(a, b, layer.rate, layer.dt_bias)
        state = layer.state.index_select(0, slots)
        if waiting:
            left = layer.factors[:, :waiting].index_select(0, slots)
            k, delta, decay = left.split_with_sizes((keys[0] * keys[1], heads * dv, heads), -1)
            k, delta = k.unflatten(-1, keys), delta.unflatten(-1, (heads, dv))
            state = self.gdn_fold(state, k, delta, decay, kept)
            layer.state.index_copy_(0, slots, state)
        out, delta = self.gdn_rows(qk, v, g, beta, state)
        leave = torch.cat((qk[:, :, 1].flatten(2), delta.flatten(2), g), -1)
        layer.factors[:, :rows].index_copy_(0, slots, leave)
        layer.conv[:, : window.shape[1]].index_copy_(0, slots, window)
        z = z.unflatten(-1, (heads, dv))
        out = out.to(z.dtype)
        return self.gated_rms_norm(out, z, layer.norm_weight, layer.eps, layer.gate).flatten(2)

    def gdn_prefill(self, proj: Tensor, layer: GdnLayer, slots: Tensor, counts: Tensor) -> Tensor:
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
        """Keep the state and the W-1 rows before the next one; norm and gate out [B, R, h, Dv]."""
        before = layer.conv_weight.shape[0] - 1
        layer.state.index_copy_(0, slots, state)
        index = counts[:, None] + torch.arange(before, device=proj.device)
        last = window.gather(1, index.unsqueeze(-1).expand(-1, -1, window.shape[-1]))
        layer.conv[:, :before].index_copy_(0, slots, last)
        z = proj.split_with_sizes(layer.widths, -1)[1].unflatten(-1, out.shape[2:])
        out = out.to(z.dtype)
        return self.gated_rms_norm(out, z, layer.norm_weight, layer.eps, layer.gate).flatten(2)

    def causal_conv(self, window: Tensor, weight: Tensor, rows: int) -> Tensor:
        taps = window.float()
        w = weight.float()
        y = taps[:, :rows] * w[0]
        for j in range(1, w.shape[0]):
            y = torch.addcmul(y, taps[:, j : j + rows], w[j])
        return F.silu(y).to(window.dtype)

    def gdn_gates(
        self, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        return F.softplus(a.float() + dt_bias) * rate, torch.sigmoid(b.float())

    def gdn_qk_norm(self, qk: Tensor) -> Tensor:
        qk = qk.float()
        return qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True) + 1e-6)

    def gdn_rows(
        self, qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_slots, rows, _, key_heads, dk = qk.shape
        repeat = v.shape[2] // key_heads
        v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2).unsqueeze(-1)
        # q rows, then k rows, by value head: one product with the state, one with the keys.
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
        """x of L x = right [..., R, Dv], with L = 1 on the diagonal and [..., R, R] below it."""
        return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)

    def gdn_fold(self, state: Tensor, k: Tensor, delta: Tensor, g: Tensor, kept: Tensor) -> Tensor:
        rows, key_heads = k.shape[1:3]
        alive = (torch.arange(rows, device=k.device) < kept.unsqueeze(-1)).unsqueeze(-1)
        g = g * alive  # [B, R, h]
        after = (
            _causal(rows, g.device).t() @ g - g
        ).exp() * alive  # decay of each row to the last kept
        weighted = (delta * after.unsqueeze(-1)).transpose(1, 2)  # [B, h, R, Dv]
        keys = k.permute(0, 2, 3, 1).unsqueeze(2)  # [B, k, 1, Dk, R]
        keys = keys.expand(-1, -1, delta.shape[2] // key_heads, -1, -1).flatten(1, 2)
        return state * g.sum(1).exp()[..., None, None] + keys @ weighted

    def head_pair(self, hidden: Tensor, head: Tensor, first_id: int) -> Tensor:
        return self.top_pair(self.linear(hidden, head), first_id)

    def head_pair_fp8(self, hidden: Tensor, head: Tensor, scales: Tensor, first_id: int) -> Tensor:
        logits = self.linear(hidden.float(), head.float()) * scales
        return self.top_pair(logits.to(hidden.dtype), first_id)

    def top_pair(self, logits: Tensor, first_id: int) -> Tensor:
        """logits [N, v] -> their pairs, as head_pair."""
        value, index = logits.float().max(-1)
        return torch.stack((value.view(torch.int32), (index + first_id).to(torch.int32)), -1)

    def head_ids(
        self, hidden: Tensor, head: Tensor, scales: Tensor | None, first_id: int, group: Group
    ) -> Tensor:
        if scales is None:
            pair = self.head_pair(hidden, head, first_id)
        else:
            pair = self.head_pair_fp8(hidden, head, scales, first_id)
        return self.choose_pair(group.all_gather(pair))

    def gather_slots(
        self, slots: Tensor, memory: SlotMemory, table: Tensor, width: int
    ) -> GatheredSlots:
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

    def choose_pair(self, gathered: Tensor) -> Tensor:
        bits, ids = gathered.unbind(-1)  # [size, N] each
        values = bits.contiguous().view(torch.float32)
        # The first rank that reaches the best value holds the smallest id among the ties.
        winner = (values == values.amax(0, keepdim=True)).to(torch.int8).argmax(0, keepdim=True)
        return ids.gather(0, winner).squeeze(0).to(torch.int64)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dim; half the time of torch's own rms_norm here."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@cache
def _number(value: float, device: torch.device) -> Tensor:
    """A float32 scalar on the device."""
    return torch.tensor(value, dtype=torch.float32, device=device)


@cache
def _causal(rows: int, device: torch.device) -> Tensor:
    """[R, R] float32: 1 where column <= row."""
    return torch.ones(rows, rows, device=device).tril()


@cache
def _between(rows: int, device: torch.device) -> Tensor:
    """[R, R * R] float32: sums g over rows j+1..i, at i * R + j, term by term.

    Differences of running sums would cancel where a decay is strong.
    """
    row = torch.arange(rows, device=device)
    inside = (row[:, None, None] <= row[:, None]) & (row[:, None, None] > row)
    return inside.float().flatten(1)
