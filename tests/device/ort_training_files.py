"""Checkpoint files that onnxruntime-training 1.19.2 wrote, byte for byte.

`INITIAL`, `PARAMETERS` and `WITH_OPTIMIZER` hold the model `(x · fc.weightᵀ + fc.bias) · scale`, before training and
after three steps of AdamW (learning rate 1e-3) on its mean squared error. Its values and data come from one generator:

    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((3, 4)), rng.standard_normal(3)      # float32, scale = [2, 3, 4]
    x, target = rng.standard_normal((5, 4)), rng.standard_normal((5, 3))    # float32

`PARAMETERS` has no optimizer state, `WITH_OPTIMIZER` has it. `EXTERNAL` is the first of the two files of a model of
1.9 GB; the second file is not included.
"""

import base64
import zlib
from dataclasses import dataclass

import numpy as np


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


@dataclass
class Training:
    """Losses, parameters and moments of a training."""

    losses: list[float]
    parameters: dict[str, np.ndarray]
    first_order_moment: dict[str, np.ndarray]
    second_order_moment: dict[str, np.ndarray]


def in_float64(steps: int) -> Training:
    """The training above, written out."""
    rng = np.random.default_rng(0)
    w, b = (rng.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((3, 4), 3))
    x, target = (rng.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in ((5, 4), (5, 3)))
    scale = np.array([2.0, 3, 4])
    beta1, beta2 = (float(np.float32(beta)) for beta in (0.9, 0.999))  # its attributes are float32
    p = {"fc.weight": w, "fc.bias": b}
    m, v = ({name: np.zeros_like(value) for name, value in p.items()} for _ in range(2))
    losses = []
    for step in range(1, steps + 1):
        error = (x @ p["fc.weight"].T + p["fc.bias"]) * scale - target
        losses.append(float((error**2).mean()))
        dh = 2 * error / error.size * scale
        for name, gradient in (("fc.weight", dh.T @ x), ("fc.bias", dh.sum(0))):
            m[name] = beta1 * m[name] + (1 - beta1) * gradient
            v[name] = beta2 * v[name] + (1 - beta2) * gradient**2
            size = 1e-3 * np.sqrt(1 - beta2**step) / (1 - beta1**step)
            p[name] = p[name] - size * m[name] / (np.sqrt(v[name]) + 1e-6)
    return Training(losses, p, m, v)


INITIAL = _unpack(
    "c-rG(U|{ff32_Ee3}62L|1SWfnShvsfd`0LfS3V{d4QM^h+*<mfY=3yo1l6?auPtS0#yqH4nPFN4GthVW(EXc1>)l5#GF(heF#mz"
    "0#v`>S&;*8xDxg;SIys#te+i-(~|X)G82n|EItMiu!|sW<%7Bpq}~RIeSp{ih;#Nc*wwqS@7w!H+5Z03Yqkp&Irsln+G$t$a+&?J"
    ";v)Nh>L&X`e=gkrs!x7@o~x!U6Ow%_P?{5BZ+U8FdPWJ54FJ2bHvj"
)

PARAMETERS = _unpack(
    "c-oU-U|{ff32_Ee3_J`X3<5xsgMkG|GB7BB#TXdg05KB-3~<5Ka6#n-fLH{G8G%>^O3wgdW*{yBVh<qJ0pgVZ|NnD9^?>9u4zC27"
    "!oZN1Uy=$knFDMx3j;{azyA=x0#%!rn$GY5$Y*Cj0FWFj5T_R8Cue~5gWM0%4+e|~bs#g6GSeAe0L@@vXs}~}iYKKOmq6@>_=y9|"
    "hPaUt>Nk+z4*;<P5QhQv3qa*0kirNe?Eu6L4vbLy7@+PePEO1Ld2kYvUK=0|0Ad4B*hT%e-4MaGFMPX-y~xH3wyLol`!(0>vfJ*x"
    "+&*Z1p?zAi@qUi!3-<?}lG}ghw~Q?llKCu1;lT;SX~}x!shQ~+B@BGv&|rZ2ix27-n7dV=?$($ia$w1in0?#C=kG^$Hwdsp%uC8l"
    "EM@=zV~bLK"
)

WITH_OPTIMIZER = _unpack(
    "c-j+TU|{ff3329O5MdBt;9=lkU;&a03@ShjqHi!UFaQw)BM?7f00AzzIxeUh0U#EEs*!=xQ-GKmh)aOj18QE)-~azPpn5=Z8HZN_"
    "O<`cj%P&a<nS9{?|NsB~LjVg@O<rm`&@PbMSQtQh*%=T3q=prUQw#EwGk`P)*kurPV894b12QKmGo9fN(0&Gn20Iq0-lWuGkn@0g"
    "WEdpCwm|$Y0o4No`9jTBAU}e_L530HUp634FUl`1FkoN^`3LbAOic$gJUD?kEm^NTH8VW}WYH?1{Q}VNu>s-$AO>n@Sn%D;`lGgt"
    "W!aoKn}{n7Hjm9uS#CNWXZ`E0l~vqsS(`1F@7QiS7HC_saDrW$aJn56lKWVY+zGNTH$OKuucS2B5XhGLhuyv=&R)B?h;rLcTZH#t"
    "d?9Cl@%FL3diy8uQ`BMKr#SbAofg-H{Xt3n`}N{94*aPWb0Ee(khwAcQNtkw%4UazLsDj9F~d3}H-W-g0h%7v%th?#Uhvpt`<U7@"
    "BH4%Tr*}B?uj2i<zv0WPeO5lL2XN^(0H+a1+T{SVA$l2++<X9t9e_COKX!W{(hfk};DBroC><6jC+2_>@}&RR!(Almx9x@qu6^O#"
    "RqRDJUa(b-<=C&eW|!S|@8$ME>kIAEl8yIsOkcP^@RZ#CJHKUY@r64gUGaf)2Lse!d{Do@+zrde8goPrEcp?$Z=3l1{fubo8##Ue"
    "kgUCB"
)

NOMINAL = _unpack(
    "c-j+SU|{ff3329N;A7xmU;$zV1`!};VgLay1_1^hpcp%l1qO^Dc^(i0hy|ePGJseIh}Zr9|6c$q#{<PMzzW30$%#3sK>8XUb?iW#"
    "maLbQnOF>D@d4c;09FBV8z0n8Z2CAM`pQ!?(=$qdYycjY68Q"
)

EXTERNAL = _unpack(
    "c-j+SU|{ff3329N;9=lkU;$zV1`!};0%9Hp0k9|o13Qog14a(8IFJFv5<tuX#413}6Ck|+h;xAW*T4V&1;Dx(7+iqZ2Z${g5P%U%"
    "GeK!)D9r+;S)nu=l6rO|H6@9eAZr*F{r~@;!NJ=HrUv9T0hsw2ot!ZBNtx+JAoeAY`UR?LM5s4pU=RZOPXw%j2Wqnrnji4!H(+4k"
    "1L_t4hZZPY`H<8q0I?1<oFSmW9!NL<5fC>xFd~HkEIf*H6LUbG1^{eZAm9"
)
