"""Every operation in plain torch: the definition that the other backends are compared with.

    Ops (parallel/device.py says what each does) -> CpuOps (here it is written out)

Float32 where the model says so: norms, softmax, gates, the delta rule and its state.
Shapes as in parallel/device.py; no operation remembers anything.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class CpuOps:
    """The CPU backend; see parallel.device.Ops for shapes and meaning."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], weight.float() + 1.0, eps)
        return y.to(x.dtype)

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
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
        self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        return g, torch.sigmoid(b.float())

    def gdn_qk_norm(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.float(), k.float()
        q = q * (torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5)
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        return q, k

    def gdn_rows(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        repeat = v.shape[2] // k.shape[2]
        rows = q.shape[1]
        q, k, v, g = (t.transpose(1, 2) for t in (q, k, v, g))  # [B, heads, R, *]
        if repeat > 1:
            q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
        beta = beta.transpose(1, 2).unsqueeze(-1)
        grown = g.cumsum(-1).exp().unsqueeze(-1)
        delta = beta * (v - grown * (k @ state))
        out = grown * (q @ state)
        if rows == 1:
            out = out + (q * k).sum(-1, keepdim=True) * delta
            return out.transpose(1, 2), delta.transpose(1, 2)
        # Sums of g over rows j+1..i, term by term: differences of running sums would cancel.
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        between = g.unsqueeze(-1).expand(*g.shape, rows).masked_fill(~later.t(), 0.0).cumsum(-2)
        between = between.exp().masked_fill(later, 0.0)  # [B, h, R, R]
        mixed = (k @ k.transpose(-1, -2)) * between * beta
        delta = torch.linalg.solve_triangular(mixed, delta, upper=False, unitriangular=True)
        out = out + ((q @ k.transpose(-1, -2)) * between) @ delta
        return out.transpose(1, 2), delta.transpose(1, 2)

    def gdn_fold(self, state: Tensor, k: Tensor, delta: Tensor, g: Tensor, kept: Tensor) -> Tensor:
        alive = torch.arange(k.shape[1], device=k.device) < kept.unsqueeze(-1)  # [B, R]
        g = g.masked_fill(~alive.unsqueeze(-1), 0.0)
        to_end = g.flip(1).cumsum(1).flip(1)  # row t: sum of g over t.. [B, R, h]
        after = F.pad(to_end[:, 1:], (0, 0, 0, 1)).exp() * alive.unsqueeze(-1)
        weighted = (delta * after.unsqueeze(-1)).transpose(1, 2)  # [B, h, R, Dv]
        keys = k.permute(0, 2, 3, 1)  # [B, k, Dk, R]
        repeat = delta.shape[2] // k.shape[2]
        if repeat > 1:
            keys = keys.repeat_interleave(repeat, 1)
        return state * to_end[:, 0].exp()[..., None, None] + keys @ weighted

    def top_row(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        value, index = logits.float().max(-1)
        return value, index
