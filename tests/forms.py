"""Every form of checkpoint that ktforge meets, in small and with zeros for weights: plans read headers alone."""

import checkpoints
import numpy as np
from checkpoints import BF16, EXPERTS
from ktforge_plugins import AutoLoader, CompressedTensors, Int4, Int8, KtAmx, KtFolderWriter, SafetensorsWriter

from ktforge import Pipeline
from ktforge.contract.tensors import DTYPES

I32, U8 = np.dtype(np.int32), np.dtype(np.uint8)
#: How a weight [out, in] is stored, by format: parameter → (dtype, shape).
STORED = {
    "fp16": lambda n, k: {"weight": ("F16", (n, k))},
    "fp8": lambda n, k: {"weight": ("F8_E4M3", (n, k)), "weight_scale_inv": ("F32", (-(-n // 128), -(-k // 128)))},
    "fp8-channel": lambda n, k: {"weight": ("F8_E4M3", (n, k)), "weight_scale": ("BF16", (n, 1))},
    "mxfp4": lambda n, k: {"weight_packed": ("U8", (n, k // 2)), "weight_scale": ("U8", (n, k // 32))},
    "compressed-tensors": lambda n, k: {
        "weight_packed": ("I32", (n, k // 8)), "weight_scale": ("BF16", (n, k // 32)), "weight_shape": ("I64", (2,)),
    },
    "gptq": lambda n, k: {
        "qweight": ("I32", (k // 8, n)), "qzeros": ("I32", (k // 32, n // 8)), "scales": ("F16", (k // 32, n)),
        "g_idx": ("I32", (k,)),
    },
    "awq": lambda n, k: {
        "qweight": ("I32", (k, n // 8)), "qzeros": ("I32", (k // 32, n // 8)), "scales": ("F16", (k // 32, n)),
    },
}  # fmt: skip
QUANTIZATION = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
}


def stored(data, form, suffixes):
    """``data`` with all weights whose names contain one of ``suffixes`` in another format."""
    made = {}
    for name, array in data.items():
        if array.ndim == 2 and any(s in name for s in suffixes):
            stem = name.removesuffix("weight")
            made |= {stem + p: np.zeros(s, DTYPES[d]) for p, (d, s) in STORED[form](*array.shape).items()}
        else:
            made[name] = array
    return made


def zeros(keys):
    return {n: np.zeros(shape, DTYPES[dtype]) for n, (dtype, shape) in keys.items()}


def moe(form=None, **changes):
    data = checkpoints.tensors()
    if form is not None:
        data = stored(data, form, [".experts."])
        changes |= {"quantization_config": QUANTIZATION[form]} if form in QUANTIZATION else {}
    return data, checkpoints.config(**changes)


def fused(model_type, **form):
    return checkpoints.fuse(checkpoints.tensors(), **form), checkpoints.config(model_type=model_type)


def gpt_oss_in_mxfp4():
    data = {}
    for name, array in fused("gpt_oss", transposed=True, interleaved=True, biases=True)[0].items():
        if name.endswith("_proj") and ".experts." in name:
            _, inner, outer = array.shape
            data[name + "_blocks"] = np.zeros((EXPERTS, outer, inner // 32, 16), np.uint8)
            data[name + "_scales"] = np.zeros((EXPERTS, outer, inner // 32), np.uint8)
        else:
            data[name] = array
    return data, checkpoints.config(model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})


def dense(form=None):
    model, keys = checkpoints.architectures()["qwen2"]
    data = zeros(keys)
    if form is not None:
        data = stored(data, form, ["_proj.weight"])
        model = model | ({"quantization_config": QUANTIZATION[form]} if form in QUANTIZATION else {})
    return data, model


def odd(size, hidden, **changes):
    """Experts of sizes that kt-amx has no room for."""
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    names = [(checkpoints.expert_name(0, e, p), shapes[p]) for e in range(2) for p in shapes]
    sizes = {"moe_intermediate_size": size, "hidden_size": hidden, "num_hidden_layers": 1, "num_experts": 2}
    return {n: np.zeros(shape, BF16) for n, shape in names}, checkpoints.config(**sizes, **changes)


def wrapped():
    data = {n.replace("model.", "model.language_model.", 1): a for n, a in checkpoints.tensors().items()}
    return data, {"model_type": "qwen3_vl_moe", "text_config": checkpoints.config(model_type="qwen3_vl_moe_text")}


def mtp(lost=".nothing."):
    """With a multi-token-prediction layer, of which what contains ``lost`` is missing."""
    data, model = moe()
    extra = {n.replace("layers.1.", "layers.2."): a for n, a in data.items() if "layers.1." in n}
    return data | {n: a.copy() for n, a in extra.items() if lost not in n}, model


def ignored():
    """Packed experts, of which config.json says that those of one layer are not."""
    data, model = moe("compressed-tensors")
    ignore = ["re:.*layers\\.1\\.mlp\\.experts.*"]
    return data, model | {"quantization_config": {**QUANTIZATION["compressed-tensors"], "ignore": ignore}}


def broken():
    """An expert is missing, another has a dtype that nothing reads."""
    data, model = moe()
    del data[checkpoints.expert_name(0, 1, "up")]
    name = checkpoints.expert_name(1, 2, "up")
    return {**data, name: data[name].astype(np.float64)}, model


#: Ordinary checkpoints by name → their tensors and config.json.
FORMS = {
    **{f"{family} family": lambda m=model, k=keys: (zeros(k), m)
       for family, (model, keys) in checkpoints.architectures().items()},
    **{f"moe {form or 'bf16'}": lambda f=form: moe(f) for form in (None, *STORED)},
    **{f"dense {form or 'bf16'}": lambda f=form: dense(f) for form in (None, *STORED)},
    "fused qwen3.5": lambda: fused("qwen3_5_moe_text"),
    "fused qwen3-vl": lambda: fused("qwen3_vl_moe_text", transposed=True),
    "fused llama4": lambda: fused("llama4_text", transposed=True, stem="feed_forward.experts"),
    "fused gpt-oss": lambda: fused("gpt_oss", transposed=True, interleaved=True, biases=True),
    "fused gpt-oss mxfp4": gpt_oss_in_mxfp4,
    "fused unknown": lambda: fused("brand_new"),
    "wrapped": wrapped,
    "mtp": mtp,
    "half an mtp": lambda: mtp(".experts.3."),
    "one node": lambda: odd(128, 256),
    "int8 alone": lambda: odd(64, 64),
    "no kt-amx": lambda: odd(96, 96),
    "columns of 36": lambda: odd(36, 36),
    "columns of 33": lambda: odd(33, 33),
    "broken": broken,
    "ignored": ignored,
}  # fmt: skip
#: Of these nothing can be made before they are mended.
WRONG = ("broken", "ignored")


def write(folder, name):
    return checkpoints.write(folder, *FORMS[name]())


def _output(quantizer, layout, writer=SafetensorsWriter, manifest=True, source=moe):
    def make(folder):
        inner = checkpoints.write(folder / "source", *source())
        out = folder / "packed"
        Pipeline(
            loader=AutoLoader(path=inner), quantize=quantizer, layout=layout, writer=writer(path=out)
        ).run(workers=1)  # fmt: skip
        if not manifest:
            (out / "ktforge_manifest.json").unlink()
        return out

    return make


#: What layouts make, by name → a function that makes it in a folder.
OUTPUTS = {
    "kt-amx": _output(Int4(), KtAmx()),
    "kt-amx of others": _output(Int8(), KtAmx(threadpool_count=4), manifest=False),
    "kt files": _output(Int8(), KtAmx(threadpool_count=1), KtFolderWriter),
    "kt files of others": _output(Int4(), KtAmx(), KtFolderWriter, manifest=False),
    "rawint4": _output(Int4(group_size=32, narrow_range=True), CompressedTensors()),
    "rawint4 of others": _output(Int4(group_size=32, narrow_range=True), CompressedTensors(), manifest=False),
    "int-quantized": _output(Int8(), CompressedTensors(format="int-quantized")),
    "dense": _output(Int4(group_size=32), CompressedTensors(), source=dense),
}
