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

FEW_ROWS = 16
"""Up to here the weight is the left factor: it streams once, where the other order repacks it."""


class CpuOps:
    """The CPU backend; see parallel.device.Ops for shapes and meaning."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        num_rows = x.numel() // x.shape[-1]
        if 1 < num_rows <= FEW_ROWS:
            return torch.mm(weight, x.reshape(num_rows, -1).t()).t().reshape(*x.shape[:-1], -1)
        return F.linear(x, weight)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * scale).to(x.dtype)

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], weight, eps)
        act = F.silu(z.float()) if gate == "silu" else torch.sigmoid(z.float())
        return (y * act).to(z.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, kept = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
        left, right = turned.chunk(2, -1)
        halves = torch.cat((-right, left), -1)
        return torch.cat((turned * cos + halves * sin, kept), -1).to(x.dtype)

    def kv_write(self, pages: Tensor, rows: Tensor, index: Tensor) -> None:
        flat = pages.flatten(0, 1)
        flat.index_copy_(0, index.reshape(-1), rows.reshape(-1, *rows.shape[2:]).to(pages.dtype))

    def paged_attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        positions: Tensor,
        lengths: Tensor,
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
        return out.permute(0, 3, 1, 2, 4).flatten(2, 3)

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
        read_q, read_k = (qk @ state).split(rows, 2)  # [B, h, R, Dv]
        dot_q, dot_k = (qk @ k.transpose(-1, -2)).split(rows, 2)  # [B, h, R, R]
        grown = g.cumsum(-1).exp().unsqueeze(-1)
        delta = beta * (v - grown * read_k)
        out = grown * read_q
        if rows == 1:
            out = out + dot_q * delta
        else:
            between = (g @ _between(rows)).unflatten(-1, (rows, rows)).exp() * _causal(rows)
            mixed = dot_k * between * beta
            delta = torch.linalg.solve_triangular(mixed, delta, upper=False, unitriangular=True)
            out = out + (dot_q * between) @ delta
        return (out * dk**-0.5).transpose(1, 2), delta.transpose(1, 2)

    def gdn_fold(self, state: Tensor, k: Tensor, delta: Tensor, g: Tensor, kept: Tensor) -> Tensor:
        rows, key_heads = k.shape[1:3]
        alive = (torch.arange(rows, device=k.device) < kept.unsqueeze(-1)).unsqueeze(-1)
        g = g * alive  # [B, R, h]
        after = (_causal(rows).t() @ g - g).exp() * alive  # decay of each row to the last kept
        weighted = (delta * after.unsqueeze(-1)).transpose(1, 2)  # [B, h, R, Dv]
        keys = k.permute(0, 2, 3, 1).unsqueeze(2)  # [B, k, 1, Dk, R]
        keys = keys.expand(-1, -1, delta.shape[2] // key_heads, -1, -1).flatten(1, 2)
        return state * g.sum(1).exp()[..., None, None] + keys @ weighted

    def top_row(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        value, index = logits.float().max(-1)
        return value, index


@cache
def _causal(rows: int) -> Tensor:
    """[R, R] float32: 1 where column <= row."""
    return torch.ones(rows, rows).tril()


@cache
def _between(rows: int) -> Tensor:
    """[R, R * R] float32: sums g over rows j+1..i, at i * R + j, term by term.

    Differences of running sums would cancel where a decay is strong.
    """
    row = torch.arange(rows)
    inside = (row[:, None, None] <= row[:, None]) & (row[:, None, None] > row)
    return inside.float().flatten(1)
