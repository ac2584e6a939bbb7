"""The operators that random programs are made of, one template a line.

A template is an expression with placeholders:

    {x:f}       an earlier value: f floating, i int64, b bool; `{x:fi@2+}` of these kinds with 2 or more axes
    {y~x}       a value of x's dtype that broadcasts with x       {y^x}   one of x's shape and dtype
    {w=EXPR}    an expression of the namespace `Draw`, with a name for later
    {EXPR}      the same without a name, as `{dim(x)}`, `{param(x.shape[-1])}`, `{num(0.1, 2)}`
    {_}         the name of the result: the template is then statements of its own, lines separated by `; `

A template that begins with `!` changes its first operand in place. One that PyTorch refuses for the operands drawn is
dropped, so that templates need not say when they apply.
"""

from __future__ import annotations

_POINTWISE = """
torch.abs({x:f})
torch.neg({x:f})
torch.sign({x:f})
torch.exp({x:f}.clamp(max=3.0))
torch.expm1({x:f}.clamp(max=2.0))
torch.exp2({x:f}.clamp(-3, 3))
torch.log({x:f}.abs() + 0.5)
torch.log1p({x:f}.abs())
torch.log2({x:f} * {x} + 1.0)
torch.log10({x:f}.square() + 1.0)
torch.sqrt({x:f}.abs() + 0.1)
torch.rsqrt({x:f} ** 2 + 0.5)
torch.reciprocal({x:f}.abs() + 1.0)
torch.sin({x:f})
torch.cos({x:f})
torch.tan({x:f}.clamp(-1, 1))
torch.asin({x:f}.tanh() * 0.9)
torch.acos({x:f}.tanh() * 0.9)
torch.atan({x:f})
torch.sinh({x:f}.clamp(-2, 2))
torch.cosh({x:f}.clamp(-2, 2))
torch.tanh({x:f})
torch.asinh({x:f})
torch.acosh({x:f}.abs() + 1.5)
torch.atanh({x:f}.tanh() * 0.9)
torch.sigmoid({x:f})
torch.erf({x:f})
torch.erfc({x:f})
torch.special.log_ndtr({x:f})
torch.special.ndtr({x:f})
torch.special.entr({x:f}.sigmoid())
torch.special.erfcx({x:f}.abs())
torch.special.i0e({x:f})
torch.sinc({x:f})
torch.logit({x:f}.sigmoid(), eps=0.01)
torch.lgamma({x:f}.abs() + 1.0)
torch.digamma({x:f}.abs() + 1.0)
torch.square({x:f})
torch.floor({x:f} * 3.0)
torch.ceil({x:f} * 3.0)
torch.round({x:f} * 3.0)
torch.trunc({x:f} * 3.0)
torch.frac({x:f} * 3.0)
torch.positive({x:f})
torch.deg2rad({x:f})
torch.rad2deg({x:f})
torch.nan_to_num({x:f})
torch.clamp({x:f}, {num(-1, 0)}, {num(0, 1)})
torch.clamp({x:f}, min={num(-1, 1)})
torch.clamp_max({x:f}, {num(-1, 1)})
torch.clamp({x:f}, min={y~x}, max={z~x})
torch.clamp({x:i}, 0, {int(1, 5)})
{x:f} ** {int(2, 4)}
{x:f}.abs() ** {num(0.5, 2.5)}
torch.pow({x:f}.abs() + 0.2, {y~x}.clamp(-2, 2))
{num(0.5, 2)} ** {x:f}.clamp(-3, 3)
torch.float_power({x:f}.abs() + 0.1, 1.5)
{x:f} + {y~x}
{x:f} - {y~x}
{x:f} * {y~x}
{x:f} / ({y~x}.abs() + 0.5)
{x:f} + {num(-2, 2)}
{num(-2, 2)} - {x:f}
{x:f} * {num(-2, 2)}
{x:f} / {num(0.5, 2)}
{num(-2, 2)} / ({x:f}.abs() + 0.5)
{x:f} + {x}
{x:f} * {x}
{x:f} * {y:i}
{x:f} * {y:b}
{x:f} + {y:f}
{x:f} * {y:f}
{x:f} - {y:f}
torch.add({x:f}, {y~x}, alpha={num(-2, 2)})
torch.sub({x:f}, {y~x}, alpha={num(-2, 2)})
torch.rsub({x:f}, {y~x})
torch.addcmul({x:f}, {y~x}, {z~x}, value={num(-1, 1)})
torch.addcdiv({x:f}, {y~x}, {z~x}.abs() + 0.5, value={num(-1, 1)})
torch.lerp({x:f}, {y~x}, {num(0, 1)})
torch.lerp({x:f}, {y~x}, {z~x}.sigmoid())
torch.maximum({x:f}, {y~x})
torch.minimum({x:f}, {y~x})
torch.fmax({x:f}, {y~x})
torch.fmin({x:f}, {y~x})
torch.atan2({x:f}, {y~x}.abs() + 0.3)
torch.hypot({x:f}, {y~x}.abs() + 0.3)
torch.logaddexp({x:f}, {y~x})
torch.logaddexp2({x:f}, {y~x})
torch.xlogy({x:f}, {y~x}.abs() + 0.3)
torch.copysign({x:f}, {y~x})
torch.heaviside({x:f}, {y~x})
torch.fmod({x:f}, {num(0.5, 2)})
torch.remainder({x:f}, {num(0.5, 2)})
torch.fmod({x:f}, {y~x}.abs() + 0.5)
torch.div({x:f}, {num(0.3, 2)}, rounding_mode={pick("floor", "trunc", quoted=True)})
torch.floor_divide({x:f}, {num(0.3, 2)})
{x:f} // {num(0.3, 2)}
{x:f} % {num(0.3, 2)}
torch.ldexp({x:f}, {y:i}.clamp(0, 3))
torch.where({x:b}, {y:f}, {z~y})
torch.where({x:f} > 0, {x}, {y~x})
torch.where({x:f} > {y~x}, {num(-1, 1)}, {x})
torch.where({x:b}, {y:f}, {num(-1, 1)})
torch.where({x:b}, {num(-1, 1)}, 0.0) * {y:f}
torch.masked_fill({x:f}, {y:b}, {num(-2, 2)})
{x:f}.masked_fill({x} > {num(-1, 1)}, {num(-2, 2)})
{x:f}.masked_fill({x} > 0, {y:f@0}.detach())
torch.special.xlog1py({x:f}, {y~x}.abs())
torch.polygamma(1, {x:f}.abs() + 1.0)
torch.special.zeta({x:f}.abs() + 2.0, 2.0)
torch.mvlgamma({x:f}.abs() + 3.0, 2)
torch.nextafter({x:f}, {y~x}).detach()
torch.stack(torch.broadcast_tensors({x:f}, {y~x}))
"""

_ACTIVATIONS = """
F.relu({x:f})
F.relu6({x:f})
F.leaky_relu({x:f}, {num(0.01, 0.3)})
F.elu({x:f}, {num(0.5, 1.5)})
F.selu({x:f})
F.celu({x:f}, {num(0.5, 1.5)})
F.gelu({x:f})
F.gelu({x:f}, approximate="tanh")
F.silu({x:f})
F.mish({x:f})
F.softplus({x:f}, {num(0.5, 2)})
F.softsign({x:f})
F.logsigmoid({x:f})
F.hardsigmoid({x:f})
F.hardswish({x:f})
F.hardtanh({x:f}, -0.7, 0.8)
F.hardshrink({x:f}, 0.3)
F.softshrink({x:f}, 0.3)
F.tanhshrink({x:f})
F.threshold({x:f}, 0.1, {num(-1, 1)})
F.prelu({x:f@2+}, {param(x.shape[1])})
F.prelu({x:f}, {param(1)})
F.rrelu({x:f}, 0.1, 0.3, training=False)
F.glu({x:f@1+}, {dim(x)})
F.softmax({x:f@1+}, {dim(x)})
F.log_softmax({x:f@1+}, {dim(x)})
F.softmin({x:f@1+}, {dim(x)})
F.softmax({x:f@1+}, -1, dtype=torch.float32)
F.softmax({x:f@1+} * {num(0.1, 2)}, {dim(x)})
{x:f} * torch.sigmoid({x} * 1.702)
0.5 * {x:f} * (1.0 + torch.erf({x} / 1.4142135623730951))
0.5 * {x:f} * (1 + torch.tanh(0.7978845608028654 * ({x} + 0.044715 * torch.pow({x}, 3))))
F.silu({x:f}) * {y^x}
F.gelu({x:f} + {param(x.shape[-1])})
F.relu({x:f} + {y^x})
F.dropout(F.relu({x:f}), {num(0.1, 0.6)}, self.training)
"""

_REDUCTIONS = """
{x:f}.sum()
{x:f}.mean()
{x:f}.sum({dim(x)}, keepdim={flag()})
{x:f}.sum({dims(x)}, keepdim={flag()})
{x:f}.mean({dim(x)}, keepdim={flag()})
{x:f}.mean({dims(x)}, keepdim={flag()})
{x:f}.sum(dtype=torch.float64)
{x:i}.sum({dim(x)})
{x:b}.sum({dim(x)})
{x:i}.float().mean()
{x:f}.prod({dim(x)}, keepdim={flag()})
{x:f}.prod()
{x:f}.amax({dims(x)}, keepdim={flag()})
{x:f}.amin({dims(x)}, keepdim={flag()})
{x:f}.max()
{x:f}.min()
{x:f}.max({dim(x)}, keepdim={flag()})
{x:f}.min({dim(x)}).values
{x:f}.max({dim(x)})[0]
torch.aminmax({x:f@1+}, dim={dim(x)})
{x:f}.argmax({dim(x)}, keepdim={flag()})
{x:f}.argmin({dim(x)})
{x:f}.argmax()
{x:f}.median({dim(x)}).values
{x:f}.median()
torch.nanmedian({x:f})
torch.kthvalue({x:f@1+}, 1, {dim(x)}).values
torch.mode({x:i@1+}, {dim(x)}).values
{x:f}.std({dim(x)}, correction={int(0, 1)}, keepdim={flag()})
{x:f}.var({dim(x)}, unbiased={flag()})
{x:f}.var({dims(x)}, correction={int(0, 1)})
{x:f}.var()
torch.var_mean({x:f}, {dim(x)}, correction=0)
torch.std_mean({x:f}, correction=0)
{x:f}.norm()
{x:f}.norm(dim={dim(x)}, keepdim={flag()})
{x:f}.norm(p=1, dim={dim(x)})
torch.linalg.vector_norm({x:f}, {pick(1, 2, 3)}, dim={dim(x)})
torch.linalg.vector_norm({x:f}, float("inf"), dim={dim(x)})
torch.linalg.norm({x:f@2})
torch.linalg.matrix_norm({x:f@2+})
F.normalize({x:f@1+}, dim={dim(x)})
F.normalize({x:f@1+}, p=1.0, dim={dim(x)})
torch.logsumexp({x:f}, {dim(x)}, keepdim={flag()})
torch.logsumexp({x:f}, {dims(x)})
torch.cumsum({x:f@1+}, {dim(x)})
torch.cumprod({x:f@1+}, {dim(x)})
torch.cummax({x:f@1+}, {dim(x)}).values
torch.cummin({x:f@1+}, {dim(x)})[0]
torch.logcumsumexp({x:f@1+}, {dim(x)})
torch.cumsum({x:i@1+}, {dim(x)})
{x:b}.any()
{x:b}.all({dim(x)})
{x:b}.any({dim(x)}, keepdim={flag()})
({x:f} > 0).float().mean({dim(x)})
torch.count_nonzero({x:i}, {dim(x)})
torch.nansum({x:f}, {dim(x)})
torch.nanmean({x:f}, {dim(x)})
torch.dist({x:f}, {y^x})
torch.cdist({x:f@2}, {y=param(3, x.shape[-1])})
F.pairwise_distance({x:f@2}, {y^x})
F.cosine_similarity({x:f@1+}, {y^x}, dim={dim(x)})
torch.trace({x:f@2})
torch.diff({x:f@1+}, dim={dim(x)})
torch.trapezoid({x:f@1+}, dim={dim(x)})
torch.renorm({x:f@2+}, 2, {dim(x)}, 1.0)
torch.quantile({x:f@1+}.float(), 0.5, dim={dim(x)})
torch.histc({x:f}.detach().float(), 4, -1.0, 1.0)
torch.bincount({x:i@1})
torch.unsqueeze({x:f}.sum({dim(x)}), {int(0, 1)})
{x:f} - {x}.mean({dim(x)}, keepdim=True)
{x:f} / ({x}.norm(dim={dim(x)}, keepdim=True) + 1e-3)
({x:f} - {x}.mean({d=dim(x)}, keepdim=True)) / ({x}.var({d}, keepdim=True, correction=0) + 1e-5).sqrt()
{x:f} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6) * {param(x.shape[-1])}
{_} = torch.exp({x:f} - {x}.amax({d=dim(x)}, keepdim=True)); {_} = {_} / {_}.sum({d}, keepdim=True)
"""

_MATMULS = """
F.linear({x:f@1+}, {param(int(1, 5), x.shape[-1])})
F.linear({x:f@1+}, {w=param(int(1, 5), x.shape[-1])}, {param(w.shape[0])})
F.linear(F.linear({x:f@1+}, {w=param(3, x.shape[-1])}), {w}.t())
{x:f@1+} @ {param(x.shape[-1], int(1, 5))}
{x:f@2+} @ {x}.transpose(-1, -2)
{x:f@2+} @ {x}.mT
{x:f@2+}.transpose(-1, -2) @ {y^x}
torch.matmul({x:f@1+}, {y:f@1+})
torch.mm({x:f@2}, {param(x.shape[1], int(1, 4))})
torch.mm({x:f@2}.t(), {y^x})
torch.bmm({x:f@3}, {y^x}.transpose(1, 2))
torch.mv({x:f@2}, {param(x.shape[1])})
torch.dot({x:f@1}, {y^x})
torch.inner({x:f@1+}, {y^x})
torch.outer({x:f@1}, {y:f@1})
torch.addmm({param(3)}, {x:f@2}, {param(x.shape[1], 3)}, beta={num(0.5, 1)}, alpha={num(0.5, 1)})
assert {x:f@2}.shape[1]; {_} = torch.addmv({param(1)}, {x}, {param(x.shape[1])})
torch.baddbmm({param(1, 1, 1)}, {x:f@3}, {y^x}.mT, beta=0.5)
torch.addr({y:f@2}, {param(y.shape[0])}, {param(y.shape[1])})
torch.addbmm({param(1, 1)}, {x:f@3}, {y^x}.mT)
torch.einsum("...i,ij->...j", {x:f@1+}, {param(x.shape[-1], int(1, 4))})
torch.einsum("ij,ij->i", {x:f@2}, {y^x})
torch.einsum("ij,kj->ik", {x:f@2}, {y^x})
torch.einsum("bij,bkj->bik", {x:f@3}, {y^x})
torch.einsum("ij->ji", {x:f@2})
torch.einsum("ii->i", {x:f@2})
torch.einsum("bi,bj->bij", {x:f@2}, {y^x})
torch.tensordot({x:f@2+}, {y^x}, dims=1)
torch.tensordot({x:f@2}, {y^x}, dims=([0], [0]))
F.bilinear({x:f@2}, {y^x}, {param(3, x.shape[1], x.shape[1])}, {param(3)})
torch.linalg.multi_dot([{x:f@2}, {param(x.shape[1], 4)}, {param(4, 2)}])
torch.matrix_power({x:f@2}, 2)
torch.cross({x:f@1+}, {y^x}, dim={dim(x)})
torch.linalg.vecdot({x:f@1+}, {y^x})
torch.linalg.det({x:f@2}.tanh() + 3.0 * torch.eye({size(x, 0)}))
torch.linalg.solve({x:f@2}.tanh() @ {x}.tanh().t() + 3.0 * torch.eye({size(x, 0)}), {x})
torch.linalg.inv({x:f@2}.tanh() @ {x}.tanh().t() + 3.0 * torch.eye({size(x, 0)}))
torch.linalg.cholesky({x:f@2}.tanh() @ {x}.tanh().t() + 3.0 * torch.eye({size(x, 0)}))
({x:f@2+} @ {x}.mT / {num(1, 3)}).softmax(-1) @ {x}
F.scaled_dot_product_attention({x:f@3+}, {y^x}, {z^x})
F.scaled_dot_product_attention({x:f@4}, {y^x}, {z^x}, is_causal=True)
F.scaled_dot_product_attention({x:f@3+}, {y^x}, {z^x}, scale={num(0.2, 1)}, attn_mask={param(x.shape[-2], x.shape[-2])})
F.scaled_dot_product_attention({x:f@3+}, {y^x}, {z^x}, attn_mask=torch.ones({n=size(x, -2)}, {n}, dtype=torch.bool).tril())
"""  # noqa: E501

_VIEWS = """
{x:f}.reshape(-1)
{x:f}.flatten()
{x:f@2+}.flatten(0, 1)
{x:f@2+}.flatten(-2)
{x:f@1+}.reshape({size(x, 0)}, -1)
{x:f@2+}.reshape(-1, {size(x, -1)})
{x:f@1+}.view(1, -1)
{x:f@1+}.view({x}.shape)
{x:f}.view(*{x}.shape, 1)
{x:f@1+}.unflatten({d=dim(x)}, (-1, 1))
{x:f@1+}.unflatten({d=dim(x)}, {pick((2, -1), (-1, 2))})
{x:f@2+}.view({size(x, 0)}, {size(x, 1)}, -1)
{x:f}.reshape({factored(x)})
{x:f@1+}.view({factored(x)})
{x:f@2+}.transpose({dim(x)}, {dim(x)})
{x:f}.permute({permutation(x)})
{x:f@2}.t()
{x:f@2+}.mT
{x:f@1+}.movedim({dim(x)}, {dim(x)})
{x:f@1+}.swapaxes({dim(x)}, {dim(x)})
{x:f}.unsqueeze({axis(x)})
{x:f}.squeeze()
{x:f}.squeeze({dim(x)})
{x:f@2+}.squeeze({dims(x)})
{x:f}.expand(2, *{x}.shape)
{x:f}.unsqueeze({axis(x)}).expand(*{x}.shape[:0], *[-1] * ({x}.dim() + 1))
{x:f}[None].expand({int(1, 3)}, *[-1] * {x}.dim())
{x:f}.expand_as({y:f})
torch.broadcast_to({x:f}, (2, *{x}.shape))
{x:f@1+}[0]
{x:f@1+}[-1]
{x:f@1+}[1:]
{x:f@1+}[:-1]
{x:f@1+}[::2]
{x:f@1+}[:0]
{x:f@1+}[..., 0]
{x:f@1+}[..., 1:]
{x:f@1+}[..., :2]
{x:f@2+}[:, 0]
{x:f@2+}[:, -1:]
{x:f@2+}[:, None]
{x:f@2+}[0, 1:]
{x:f@2+}[1:, :2]
{x:f@2+}[:, ::2]
{x:f@3+}[:, 0, :]
{x:f@3+}[:, 1:, ::2]
{x:f}[None]
{x:f}[..., None]
{x:f@1+}[{int(-2, 3)}:{int(-2, 4)}]
{x:f@1+}.narrow({d=dim(x)}, 0, 1)
{x:f@1+}.narrow({d=dim(x)}, 1, {size(x, d)} - 1)
{x:f@1+}.select({dim(x)}, {int(-1, 1)})
{x:f@1+}.select({d=dim(x)}, {size(x, d)} - 1)
{x:f@1+}.chunk(2, {dim(x)})
{x:f@1+}.chunk(2, {dim(x)})[0]
{x:f@1+}.split(1, {dim(x)})[0]
{x:f@1+}.split(2, {dim(x)})
torch.split({x:f@1+}, [1, {size(x, 0)} - 1])
torch.tensor_split({x:f@1+}, 2, {dim(x)})
torch.tensor_split({x:f@1+}, (1,), {dim(x)})
{x:f@1+}.unbind({dim(x)})[0]
{x:f@1+}.unbind({dim(x)})
{x:f@2+}.diagonal(dim1=-2, dim2=-1)
{x:f@2+}.diagonal({int(-1, 1)}, 0, 1)
torch.diag({x:f@1+})
torch.diag_embed({x:f@1+}, {int(-1, 1)})
{x:f@1+}.unfold({dim(x)}, 2, {int(1, 2)})
{x:f@1+}.unfold({dim(x)}, 1, 1)
{x:f} * {x}.data
{x:f@1+}.as_strided(({size(x, 0)},), (1,))
{x:f@2+}.swapdims(0, 1).contiguous()
{x:f@2+}.transpose(0, 1).reshape(-1)
{x:f@3+}.transpose(1, 2).flatten(1)
{x:f}.contiguous()
{x:f}.clone()
{x:f}.detach()
{x:f}.detach() * {y~x}
torch.atleast_2d({x:f})
torch.atleast_1d({x:f@0})
torch.ravel({x:f})
{x:i}.view(-1)
{x:i@1+}[0]
{x:i@1+}.unsqueeze(-1)
{x:b}.reshape(-1)
{x:f@1+}.view(torch.int32).view(torch.float32)
torch.view_as_real(torch.view_as_complex(torch.stack([{x:f}.float(), {y^x}.float()], -1)))
torch.complex({x:f}.float(), {y^x}.float()).abs()
torch.fft.rfft({x:f@1+}.float()).abs()
torch.fft.irfft(torch.fft.rfft({x:f@1+}.float()) * 0.5)
"""

_MOVES = """
torch.cat([{x:f@1+}, {y^x}], {dim(x)})
torch.cat([{x:f@1+}, {x}, {y^x}], {dim(x)})
torch.cat([{x:f@1+}[:1], {x}[1:]])
torch.cat([{x:f@1+}, {x}.new_zeros({x}.shape)], {dim(x)})
torch.cat([{x:f@2+}.flatten(), {y:f}.flatten()])
torch.stack([{x:f}, {y^x}], {axis(x)})
torch.stack([{x:f}, {x} * 2, {y^x}])
torch.hstack([{x:f@1+}, {y^x}])
torch.vstack([{x:f@1+}, {y^x}])
torch.dstack([{x:f@1+}, {y^x}])
torch.column_stack([{x:f@1+}, {y^x}])
{x:f}.repeat(*[2] * {x}.dim())
{x:f@1+}.repeat({int(1, 2)}, *[1] * ({x}.dim() - 1), )
{x:f@1+}.repeat_interleave(2, {dim(x)})
{x:f@1+}.repeat_interleave({int(1, 3)})
torch.tile({x:f}, ({int(1, 2)}, 2))
torch.flip({x:f@1+}, ({dim(x)},))
torch.fliplr({x:f@2+})
torch.roll({x:f@1+}, {int(-2, 2)}, {dim(x)})
torch.roll({x:f@1+}, 1)
torch.rot90({x:f@2+})
torch.tril({x:f@2+}, {int(-1, 1)})
torch.triu({x:f@2+}, {int(-1, 1)})
F.pad({x:f@1+}, ({int(0, 2)}, {int(0, 2)}))
F.pad({x:f@1+}, ({int(0, 2)}, {int(-1, 2)}), value={num(-1, 1)})
F.pad({x:f@2+}, (1, 0, {int(0, 1)}, 1), value={num(-1, 1)})
F.pad({x:f@2+}, (1, 1), mode={pick("reflect", "replicate", "circular", quoted=True)})
F.pad({x:f@3+}, (1, 1, 1, 0), mode={pick("reflect", "replicate", quoted=True)})
F.pad({x:f@1+}, (-1, 0))
torch.gather({x:f@1+}, {d=dim(x)}, {index(x, d)})
torch.take_along_dim({x:f@1+}, {x}.argsort({d=dim(x)}), {d})
torch.index_select({x:f@1+}, {d=dim(x)}, {indices(x, d)})
{x:f@1+}[{indices(x, 0)}]
{x:f@2+}[:, {indices(x, 1)}]
{x:f@2+}[{indices(x, 0)}, {indices(x, 1)}]
{x:f@2+}[{indices(x, 0)}[:, None], {indices(x, 1)}]
{x:f@3+}[:, {indices(x, 1)}, 0]
{x:f@3+}[{indices(x, 0)}, :, {indices(x, 2)}]
{x:f@2+}[0, {indices(x, 1)}]
{x:f@2+}[..., {indices(x, -1)}]
{x:f@1+}[torch.arange({size(x, 0)})]
{x:f@2+}[torch.arange({size(x, 0)}), 0]
{x:f@3}[torch.arange({size(x, 0)}), ({x}[..., 0] > 0).sum(-1).clamp(max={size(x, 1)} - 1)]
torch.take({x:f}, {indices(x, None)})
F.embedding({x:i}, {param(8, int(1, 4))})
F.embedding({x:i}, {param(8, 3)}, padding_idx=0)
F.embedding({x:i}, {param(8, 3)}) * {num(0.5, 2)}
F.embedding_bag({x:i@2}, {param(8, 3)}, mode={pick("sum", "mean", "max", quoted=True)})
F.one_hot({x:i}, 8).float()
torch.sort({x:f@1+}, {dim(x)}, descending={flag()})
torch.sort({x:f@1+}, {dim(x)}).values
torch.argsort({x:f@1+}, {dim(x)})
torch.topk({x:f@1+}, 1, {dim(x)})
torch.topk({x:f@1+}, 2, {dim(x)}).values
torch.msort({x:f@1+})
torch.scatter({x:f@1+}, {d=dim(x)}, {index(x, d)}, {num(-1, 1)})
torch.scatter({x:f@1+}, {d=dim(x)}, {x}.argsort({d}), {y^x})
torch.scatter_add({x:f@1+}, {d=dim(x)}, {index(x, d)}, {y^x})
torch.scatter_reduce({x:f@1+}, {d=dim(x)}, {index(x, d)}, {y^x}, {pick("sum", "mean", "amax", quoted=True)})
torch.index_add({x:f@1+}, {d=dim(x)}, {indices(x, d, exact=True)}, {y^x}, alpha={num(0.5, 2)})
torch.index_copy({x:f@1+}, {d=dim(x)}, torch.arange({size(x, d)}).flip(0), {y^x})
torch.index_fill({x:f@1+}, {d=dim(x)}, {indices(x, d)}, {num(-1, 1)})
torch.index_put({x:f@1+}, ({indices(x, 0)},), {y:f@0}, accumulate={flag()})
{x:f@1+}.masked_scatter({x} > 0, {y^x})
torch.select_scatter({x:f@2+}, {x}[0] * 2, 0, 0)
torch.slice_scatter({x:f@1+}, {x}[1:] * 2, 0, 1)
torch.diagonal_scatter({x:f@2}, {x}.diagonal() * 3)
torch.meshgrid({x:f@1}, {y:f@1}, indexing={pick("ij", "xy", quoted=True)})
torch.cartesian_prod({x:f@1}, {y:f@1})
torch.combinations({x:f@1})
torch.block_diag({x:f@2}, {y:f@2})
torch.vander({x:f@1}, 3)
torch.bucketize({x:f}.detach(), torch.tensor([-0.5, 0.0, 0.7]))
torch.searchsorted(torch.tensor([-0.5, 0.0, 0.7]), {x:f}.detach().float())
F.pixel_shuffle({x:f@4}, 2)
assert {x:f@4}.numel(); {_} = F.pixel_unshuffle({x}, 2)
F.channel_shuffle({x:f@4}, 2)
F.unfold({x:f@4}, (2, 2))
F.fold({x:f@3}, (2, 2), (1, 1))
"""

_INTEGERS = """
{x:f} > {num(-1, 1)}
{x:f} >= {y~x}
{x:f} < {y~x}
{x:f} == {x}
{x:f} != {y~x}
{x:i} == {int(0, 3)}
{x:i} > {y~x}
{x:i} != 0
~{x:b}
{x:b} & {y^x}
{x:b} | {y^x}
{x:b} ^ {y^x}
torch.logical_and({x:f} > 0, {x} < 1)
torch.logical_not({x:b})
torch.logical_or({x:b}, {y^x})
torch.isnan({x:f})
torch.isfinite({x:f})
torch.isclose({x:f}, {x})
{x:i} + {y~x}
{x:i} * {int(-2, 3)}
{x:i} - {int(0, 3)}
{x:i} // 2
{x:i} % 3
-{x:i}
{x:i}.abs()
torch.div({x:i}, 2)
{x:i} / 3
torch.maximum({x:i}, {y~x})
{x:i} << 1
{x:i} & 3
({x:i} | 4) ^ 1
torch.clamp({x:i}, min=1)
{x:i}.float()
{x:i}.float() * {num(0.1, 1)} + {y:f}
{x:b}.float()
{x:b}.long()
{x:b}.to({y:f}.dtype) * {y}
{x:f}.long()
({x:f} * 3).round().to(torch.int64)
{x:f}.bool()
{x:f}.to(torch.int32).float()
{x:f@1} * torch.arange({size(x, 0)}).float()
{x:f@1+} + torch.arange({size(x, -1)})
torch.arange(0, 3) * {num(0.5, 1)}
{x:f@1+} * torch.linspace(0, 1, {size(x, -1)})
{x:f@1} + torch.full(({size(x, 0)},), {num(-1, 1)})
torch.zeros_like({x:f}) + {y~x}
torch.ones_like({x:f}) * {y:f@0}
{x:f@1+} + torch.zeros({size(x, 0)}, 2).sum()
torch.full_like({x:f}, {num(-1, 1)})
torch.empty_like({x:f}).fill_({num(-1, 1)}) * {x}
{x:f}.new_ones(2, 3) * {y:f@0}
{x:f@2} + torch.eye({size(x, 0)})
torch.eye(3)
torch.tensor([1.0, -2.0, 0.5]).sum() * {x:f}
torch.scalar_tensor({num(-1, 1)}) * {x:f}
{x:f} * {x}.size(0) if {x}.dim() else {x}
{x:f@1+} / {x}.shape[-1]
{x:f@1+} * ({x}.shape[0] + 1) ** 0.5
{x:f@1+} + {x}.numel()
{x:f}.to(torch.float64)
{x:f}.double() * {y~x}
{x:f}.to(torch.bfloat16)
{x:f}.bfloat16().float()
{x:f}.to(torch.float32)
{x:f}.to({y:f}.dtype)
{x:f}.type_as({y:f})
{x:f} + torch.tensor({num(-1, 1)}, dtype=torch.float64)
{x:f@0}.to(torch.float64) * {y:f}
{x:f} + torch.ones((), dtype=torch.int64)
torch.promote_types({x:f}.dtype, torch.float32) and {x}
{x:i}.bitwise_not()
torch.cumsum({x:b@1+}.long(), {dim(x)})
"""

_LAYERS = """
F.layer_norm({x:f@1+}, ({size(x, -1)},))
F.layer_norm({x:f@1+}, {x}.shape[-1:], {param(x.shape[-1])}, {param(x.shape[-1])})
F.layer_norm({x:f@2+}, {x}.shape[-2:])
F.rms_norm({x:f@1+}, {x}.shape[-1:], {param(x.shape[-1])})
F.group_norm({x:f@2+}, 1, {param(x.shape[1])}, {param(x.shape[1])})
F.group_norm({x:f@3+}, {size(x, 1)})
F.instance_norm({x:f@3+})
F.batch_norm({x:f@2+}, {buffer(x.shape[1])}, {buffer(x.shape[1], positive=True)}, training=self.training)
F.batch_norm({x:f@2+}, {b=buffer(x.shape[1])}, {b}.abs() + 0.5, {param(x.shape[1])}, {param(x.shape[1])})
F.batch_norm({x:f@2+}, None, None, {param(x.shape[1])}, training=True)
F.local_response_norm({x:f@3+}, 2)
{x:f@1+} + {module("nn.Identity")}({x})
F.dropout({x:f}, {num(0.1, 0.6)}, self.training)
F.dropout({x:f}, 0.3) * {y~x}
F.dropout1d({x:f@3}, 0.4, self.training)
F.dropout2d({x:f@4}, 0.4, self.training)
F.alpha_dropout({x:f}, 0.3, self.training)
F.feature_alpha_dropout({x:f@3+}, 0.3, self.training)
F.dropout(F.softmax({x:f@1+}, -1), 0.2, self.training)
F.dropout({x:f} + {param(x.shape[-1])}, 0.2, self.training) + {y^x}
F.conv1d({x:f@3}, {param(int(1, 4), x.shape[1], int(1, 2))}, padding={int(0, 1)}, stride={int(1, 2)})
F.conv1d({x:f@3}, {w=param(3, x.shape[1], 2)}, {param(3)}, padding="same")
F.conv1d({x:f@3}, {param(x.shape[1], 1, 2)}, padding=1, groups={size(x, 1)})
F.conv2d({x:f@4}, {param(int(1, 4), x.shape[1], 1, 2)}, padding={int(0, 1)})
F.conv2d({x:f@4}, {w=param(2, x.shape[1], 2, 2)}, {param(2)}, stride=2, padding=1, dilation={int(1, 2)})
F.conv2d({x:f@3}, {param(2, x.shape[0], 1, 1)})
F.conv_transpose1d({x:f@3}, {param(x.shape[1], int(1, 3), 2)}, stride={int(1, 2)})
F.conv_transpose2d({x:f@4}, {param(x.shape[1], 2, 2, 2)}, {param(2)}, stride=2)
F.max_pool1d({x:f@3}, 2, padding={int(0, 1)})
F.max_pool2d({x:f@4}, 2, {int(1, 2)}, ceil_mode={flag()})
F.max_pool1d({x:f@3}, 2, return_indices=True)
F.avg_pool1d({x:f@3}, 2, {int(1, 2)}, padding={int(0, 1)}, count_include_pad={flag()})
F.avg_pool2d({x:f@4}, 2, padding=1, ceil_mode={flag()})
F.lp_pool1d({x:f@3}.abs() + 0.1, 2, 2)
F.adaptive_avg_pool1d({x:f@3}, {int(1, 3)})
F.adaptive_avg_pool2d({x:f@4}, (1, 2))
F.adaptive_avg_pool2d({x:f@4}, 1)
F.adaptive_max_pool1d({x:f@3}, {int(1, 3)})
F.adaptive_max_pool2d({x:f@4}, 2)
F.interpolate({x:f@3}, scale_factor=2.0)
F.interpolate({x:f@3}, size={int(1, 5)}, mode={pick("nearest", "linear", "nearest-exact", quoted=True)})
F.interpolate({x:f@4}, scale_factor={num(0.5, 2)}, mode={pick("nearest", "bilinear", "bicubic", quoted=True)})
F.interpolate({x:f@4}, size=(3, 2), mode={pick("bilinear", "bicubic", quoted=True)}, align_corners={flag()})
F.interpolate({x:f@4}, size=(2, 3), mode="area")
F.grid_sample({x:f@4}, {param(x.shape[0], 2, 2, 2)}.tanh(), align_corners={flag()})
F.affine_grid({param(2, 2, 3)}, (2, 1, 2, 3), align_corners={flag()})
"""

_LOSSES = """
F.mse_loss({x:f}, {y^x})
F.mse_loss({x:f}, {y^x}.detach(), reduction={pick("none", "sum", "mean", quoted=True)})
F.l1_loss({x:f}, {y^x}, reduction={pick("none", "sum", "mean", quoted=True)})
F.smooth_l1_loss({x:f}, {y^x}, beta={num(0.3, 1)})
F.huber_loss({x:f}, {y^x}, delta={num(0.3, 1)}, reduction={pick("none", "mean", quoted=True)})
F.binary_cross_entropy({x:f}.sigmoid(), {y^x}.sigmoid().detach())
F.binary_cross_entropy_with_logits({x:f}, {y^x}.sigmoid(), reduction={pick("none", "sum", "mean", quoted=True)})
F.binary_cross_entropy_with_logits({x:f@1+}, ({y^x} > 0).to({x}.dtype), pos_weight={param(x.shape[-1])}.abs())
F.kl_div(F.log_softmax({x:f@1+}, -1), F.softmax({y^x}, -1), reduction="batchmean")
F.kl_div(F.log_softmax({x:f@1+}, -1), F.log_softmax({y^x}, -1), reduction="sum", log_target=True)
F.cross_entropy({x:f@2}, {labels(x)})
F.cross_entropy({x:f@2}, {labels(x)}, ignore_index={int(0, 2)})
F.cross_entropy({x:f@2}, {labels(x)}, label_smoothing=0.1, reduction={pick("none", "sum", "mean", quoted=True)})
F.cross_entropy({x:f@2}, {labels(x)}, weight={buffer(x.shape[1], positive=True)})
F.cross_entropy({x:f@2}, F.softmax({y^x}, 1))
F.cross_entropy(F.linear({x:f@2}, {w=param(8, x.shape[1])}), {labels(x, 8)}, ignore_index=1)
{_} = F.linear(F.gelu(F.linear({x:f@2}, {param(4, x.shape[1])})), {param(8, 4)}); {_} = F.cross_entropy({_}, {labels(x, 8)}, ignore_index=1)
F.cross_entropy({x:f@3}.transpose(1, 2), {x}.argmax(-1))
F.cross_entropy({x:f@3}.flatten(0, 1), {x}.argmin(-1).flatten())
F.cross_entropy({x:f@3}[:, :-1].flatten(0, 1), {x}[:, 1:].argmax(-1).flatten(), ignore_index=0)
F.nll_loss(F.log_softmax({x:f@2}, 1), {labels(x)}, reduction={pick("none", "sum", "mean", quoted=True)})
F.nll_loss(F.log_softmax({x:f@2}, 1), {labels(x)}, ignore_index=0)
F.poisson_nll_loss({x:f}.clamp(max=2), {y^x}.abs().detach())
F.gaussian_nll_loss({x:f}, {y^x}, {x}.abs().detach() + 0.3)
F.hinge_embedding_loss({x:f}, {y^x}.detach().sign())
F.margin_ranking_loss({x:f}, {y^x}, torch.ones_like({x}), margin=0.2)
F.cosine_embedding_loss({x:f@2}, {y^x}, torch.ones({size(x, 0)}))
F.triplet_margin_loss({x:f@2}, {y^x}, {z^x})
F.soft_margin_loss({x:f}, torch.ones_like({x}))
F.multi_margin_loss({filled(x := f('f@2'))}, {labels(x)})
F.multilabel_soft_margin_loss({x:f@2}, ({y^x} > 0).to({x}.dtype))
{_} = torch.ones({size(x := f('f@3'), 0)}, dtype=torch.int64); {_} = F.ctc_loss(torch.cat([{x}, {x}], -1).transpose(0, 1).float().log_softmax(-1), {_}[:, None], {_} * {x}.shape[1], {_})
"""  # noqa: E501

_MODULES = """
{module("nn.Linear", None, 4, operand=(x := f("f@1+")))}({x})
{module("nn.Linear", None, 3, bias=False, operand=(x := f("f@1+")))}({x})
{module("nn.LayerNorm", None, operand=(x := f("f@1+")))}({x})
{module("nn.RMSNorm", None, operand=(x := f("f@1+")))}({x})
{module("nn.GELU")}({x:f})
{module("nn.Dropout", 0.3)}({x:f})
{module("nn.Softmax", -1)}({x:f@1+})
{module("nn.BatchNorm1d", None, operand=(x := f("f@2")))}({x})
{module("nn.PReLU")}({x:f})
{module("nn.Embedding", 8, 3)}({x:i})
{module("nn.Embedding", 8, 3, padding_idx=1)}({x:i})
{module("nn.LSTM", None, 3, batch_first=True, operand=(x := f("f@3")))}({x})[0]
{module("nn.GRU", None, 3, operand=(x := f("f@3")))}({x})[0]
{module("nn.RNN", None, 2, batch_first=True, nonlinearity="relu", operand=(x := f("f@3")))}({x})[1]
{module("nn.LSTMCell", None, 3, operand=(x := f("f@2")))}({x})
{module("nn.GRUCell", None, 3, operand=(x := f("f@2")))}({x})
{module("Residual", None, operand=(x := f("f@1+")))}({x})
{module("Gated", None, operand=(x := f("f@1+")))}({x})
{module("Residual", None, operand=(x := f("f@1+")))}({module("Residual", None, operand=x)}({x}))
{module("SelfAttention", None, operand=(x := f("f@3")))}({x})
nn.functional.linear({m=module("nn.Linear", None, 4, operand=(x := f("f@1+")))}({x}), {m}.weight.t())
"""

_IN_PLACE = """
!{x:f}.mul_({num(-2, 2)})
!{x:f}.add_({y~x})
!{x:f}.sub_({y~x}, alpha=0.5)
!{x:f}.div_({num(1, 2)})
!{x:f}.mul_({y~x})
!{x:f}.neg_()
!{x:f}.tanh_()
!{x:f}.sigmoid_()
!{x:f}.relu_()
!{x:f}.exp_()
!{x:f}.clamp_(-1, 1)
!{x:f}.zero_()
!{x:f}.fill_({num(-1, 1)})
!{x:f}.copy_({y~x})
!{x:f}.copy_({y:f@0})
!{x:f}.masked_fill_({x} > 0, {num(-1, 1)})
!{x:f}.masked_fill_({y:b}, 0.5)
!{x:f}.addcmul_({y~x}, {z~x})
!{x:f}.addcdiv_({y~x}, {z~x}.abs() + 1)
!{x:f}.lerp_({y~x}, 0.3)
!{x:f}.pow_(2)
!{x:f@1+}.index_add_(0, {indices(x, 0, exact=True)}, {y^x})
!{x:f@1+}.index_fill_({d=dim(x)}, {indices(x, d)}, 0.3)
!{x:f@1+}.index_copy_(0, torch.arange({size(x, 0)}), {y^x})
!{x:f@1+}.scatter_({d=dim(x)}, {index(x, d)}, 0.7)
!{x:f@1+}.scatter_add_({d=dim(x)}, {index(x, d)}, {y^x})
!{x:f@1+}.index_put_(({indices(x, 0)},), {y:f@0})
!{x:f@2}.fill_diagonal_(0.5)
!{x:f@2+}.tril_()
!{x:f@2+}.transpose_(0, 1)
!{x:f}.unsqueeze_(0)
!{x:f}.squeeze_()
!{x:f@2}.t_()
!{x:f}.detach_()
!{x:f@2}.swapaxes_(0, 1)
!F.dropout({x:f}, 0.4, False).mul_({num(0.5, 2)})
!{x:f}.type_as({x}).add_(1.0)
!torch.broadcast_tensors({x:f}, {x})[0].mul_({num(0.5, 2)})
!{x:f@1+}.chunk(2)[0].neg_()
!F.relu({x:f}, inplace=True)
!F.leaky_relu_({x:f}, 0.1)
!F.dropout({x:f}, 0.3, self.training, inplace=True)
!F.silu({x:f}, inplace=True)
!{x:f@1+}.cumsum_({dim(x)})
!{x:i}.add_(1)
!{x:i}.clamp_(0, 2)
!{x:b}.logical_not_()
!{x:f@1+}[0].mul_(2.0)
!{x:f@1+}[1:].add_({num(-1, 1)})
!{x:f@2+}[:, 0].zero_()
!{x:f@1+}.select({dim(x)}, 0).copy_({y:f@0})
!{x:f@1+}.narrow({dim(x)}, 0, 1).fill_({num(-1, 1)})
!{x:f@2+}.transpose(0, 1)[0].neg_()
!{x:f@1+}.view(-1)[0].add_(1.0)
!{x:f@1+}.view(-1).mul_({num(0.5, 1)})
!{x:f@2+}.diagonal().add_(1.0)
!{x:f@1+}[0] = {num(-1, 1)}
!{x:f@1+}[-1] = {y:f@0}
!{x:f@1+}[1:] = {x}[:-1].clone()
!{x:f@1+}[..., 0] = {y:f@0} * 2
!{x:f@2+}[:, 1:] *= 0.5
!{x:f@1+}[::2] += 1
!{x:f@1+}[{x} > 0] = {num(-1, 1)}
!{x:f@1+}[{indices(x, 0)}] = {y:f@0}
!{x:f@1+}[{indices(x, 0)}] *= 2.0
!{x:f@2+}[{indices(x, 0)}, 0] = 0.5
!{x:f} += {y~x}
!{x:f} *= {num(-1, 1)}
!{x:f} -= {y~x}.detach()
!{x:f} /= 2
!{x:i} += 1
!{b=buffer(3)}.add_({x:f}.detach().mean())
!{b=buffer(3)}.mul_(0.9).add_({x:f}.detach().sum() * 0.1)
!{b=buffer(4)}.copy_({x:f@0}.detach())
!{b=buffer(2, 3)}[0].copy_({x:f@0}.detach())
!{b=buffer(2)}.lerp_({x:f}.detach().mean(), 0.1)
!{b=buffer(3)}.data.mul_({num(0.5, 2)})
!{b=buffer(3)}.data.copy_({x:f}.detach().mean())
!{x:f}.data.mul_({num(0.5, 2)})
!{x:f}.data[...] = {num(-1, 1)}
!{b=counter()}.add_(1)
!{b=counter()} += 2
"""

_CONTROL = """
{_} = {x:f@1+} * 2 if {x}.size(0) > {int(1, 4)} else {x} + 1
{_} = {x:f} + (1.0 if self.training else 2.0)
{_} = {x:f} * self.scale
{_} = {x:f@1+} if self.depth > 1 else {x}[:1]
{_} = {x:f}; for step in range(self.depth): {_} = torch.tanh({_} + step * 0.1)
{_} = {x:f@1+}.new_zeros(()); for row in {x}: {_} = {_} + row.sum()
{_} = sum([{x:f} * k for k in range(1, 3)])
{_} = sum({x:f}.unbind(0)) if {x}.dim() and {x}.size(0) else {x}
{_} = max([{x:f@0}, {x} * 0.5], key=lambda t: t.dim())
with torch.no_grad(): {_} = {x:f} * {y~x}
with torch.no_grad(): {_} = F.softmax({x:f@1+}, -1)
with torch.enable_grad(): {_} = {x:f} * 1.5
with torch.autocast("cpu", torch.bfloat16): {_} = F.linear({x:f@1+}, {param(3, x.shape[-1])})
with torch.autocast("cpu", torch.bfloat16): {_} = torch.matmul({x:f@2+}, {x}.mT).float()
with torch.autocast("cpu", enabled=False): {_} = {x:f} * 2.0
{_} = checkpoint(lambda t: torch.tanh(t) * t, {x:f}, use_reentrant=False)
{_} = checkpoint(lambda t, w: F.gelu(F.linear(t, w)), {x:f@1+}, {param(3, x.shape[-1])}, use_reentrant=False)
{_} = Doubled.apply({x:f})
{_} = torch.stack([row * 2 for row in {x:f@1+}]) if {x}.size(0) else {x}
{_} = torch.cat([part * k for k, part in enumerate({x:f@1+}.split(1))]) if {x}.size(0) else {x}
{_} = [t for t in ({x:f}, {y:f}) if t.dim() == {x}.dim()][-1]
{_} = dict(first={x:f} * 2, second={y:f})["first"]
{_} = {x:f} if torch.is_grad_enabled() else -{x}
{_} = {x:f} * 3 if {x}.requires_grad else {x} * 2
assert {x:f}.dim() < 9; {_} = {x} * 1.25
{_} = {x:f} * len({x}.shape)
{_} = {x:f@1} * torch.rand({size(x, 0)}, dtype=torch.float)
{_} = {x:f} + torch.randn((), dtype=torch.float) * 0.1
"""

_PATTERNS = """
({x:f@3+} @ {param(x.shape[-1], 6)} + {param(6)}).view(*{x}.shape[:-1], 2, 3).transpose(-2, -3)
{x:f} + F.dropout(F.linear({x}, {w=param(x.shape[-1], x.shape[-1])}), 0.2, self.training)
F.layer_norm({x:f@1+} + {y^x}, {x}.shape[-1:], {param(x.shape[-1])}, {param(x.shape[-1])})
F.layer_norm({x:f@2+}, {x}.shape[-1:])[:, 0]
F.gelu({x:f@2+})[..., 0]
F.linear({x:f@2+}, {param(4, x.shape[-1])})[:, -1]
F.linear({x:f@2+}, {param(4, x.shape[-1])})[{indices(x, 0)}]
(F.linear({x:f@2+}, {param(4, x.shape[-1])}) * 0.5)[0]
F.softmax({x:f@2+}, -1)[:, 1:]
torch.tanh({x:f@2+} * {param(x.shape[-1])})[1:]
F.gelu(F.linear({x:f@2+}, {param(4, x.shape[-1])}, {param(4)}))[:, :1]
torch.cat([{x:f@2+}[..., 1:], -{x}[..., :1]], -1) * {y^x} + {x}
torch.cat([-{x:f@1+}.chunk(2, -1)[1], {x}.chunk(2, -1)[0]], -1)
{x:f@2+}.float().softmax(-1).to({x}.dtype)
{x:f@1+}.transpose(0, -1).transpose(0, -1)
{x:f}.to(torch.float64).to({x}.dtype)
({x:f} * 2.0) * 0.25
(({x:f@2+} * 0.5) @ {x}.mT) * 2.0
{x:f@2+}.reshape(-1, {size(x, -1)}).reshape({x}.shape)
{x:f@2+}.unsqueeze(0).squeeze(0).contiguous()
({x:f} + 0.0) * 1.0
{x:f} - 0
-(-{x:f})
{x:f@1+}.sum(0) + {x}.sum(0)
torch.split(F.linear({x:f@2+}, {param(6, x.shape[-1])}), 2, -1)
torch.unbind(F.linear({x:f@2+}, {param(6, x.shape[-1])}).view(*{x}.shape[:-1], 3, 2), -2)
{x:f@3+}[:, 0].unsqueeze(1) * {x}
F.relu(F.conv2d({x:f@4}, {param(2, x.shape[1], 1, 1)}, {param(2)}))
F.max_pool2d(F.relu({x:f@4}), 2)
{x:f@2+}.masked_fill(torch.ones({size(x, -2)}, {size(x, -1)}, dtype=torch.bool).triu(1), -1e9).softmax(-1)
"""

GROUPS = {
    "pointwise": (4.0, _POINTWISE),
    "activations": (2.0, _ACTIVATIONS),
    "reductions": (2.5, _REDUCTIONS),
    "matmuls": (2.5, _MATMULS),
    "views": (4.0, _VIEWS),
    "moves": (3.0, _MOVES),
    "integers": (1.5, _INTEGERS),
    "layers": (1.5, _LAYERS),
    "losses": (0.8, _LOSSES),
    "modules": (1.0, _MODULES),
    "in place": (1.6, _IN_PLACE),
    "control": (1.0, _CONTROL),
    "patterns": (1.5, _PATTERNS),
}
OPERATORS = {group: (weight, tuple(text.strip().splitlines())) for group, (weight, text) in GROUPS.items()}
