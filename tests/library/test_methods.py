"Methods: names, configurations, what each name builds, and independence of the experiments."

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from ega.data.arrays import InputError, normalize
from ega.method import methods
from ega.method.adapters import (
    LinearAdapter,
    adapter_fingerprint,
    load_adapter,
    save_adapter,
    transform,
)
from ega.method.closed_form import ClassStatistics, DiscriminantWhitening
from ega.method.config import (
    ABLATIONS,
    METHODS,
    AdapterConfig,
    LossConfig,
    MethodConfig,
    TrainConfig,
    build_method_config,
    config_to_dict,
    parse_config,
    uses_gradient_training,
)
from ega.method.losses import LOSSES, supcon
from ega.method.methods import (
    build_adapter,
    build_objective,
    fit_adapter,
    fit_method,
    fit_path,
    needed_rows,
)

TRAINED = [name for name in METHODS if uses_gradient_training(name)]


def make_data(n=120, d=12, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % classes
    return normalize(rng.normal(size=(n, d)) + 2 * rng.normal(size=(classes, d))[y]), y


def small(method, **options):
    "The configuration of a method with few epochs, hidden units and ranks."
    config = build_method_config(method, epochs=2, **options)
    sizes = {name: 4 for name in ("hidden", "rank") if getattr(config.adapter, name) is not None}
    return replace(config, adapter=replace(config.adapter, **sizes))


# names and configurations


@pytest.mark.parametrize("method", METHODS)
def test_parse_config_round_trip(method):
    "Through a dictionary and through JSON; fields added later are restored at their default."
    config = build_method_config(method, seed=2)
    values = config_to_dict(config)
    assert parse_config(MethodConfig, values) == parse_config(MethodConfig, json.dumps(values)) == config
    assert config_to_dict(config) == values
    assert "self_positive" not in json.dumps(values)


def test_parse_config_keeps_added_fields_that_are_not_default():
    loss, train = LossConfig("triplet", sampler="dataset", self_positive=True), TrainConfig(schedule="constant")
    config = MethodConfig(AdapterConfig("linear"), loss, train)
    assert parse_config(MethodConfig, json.dumps(config_to_dict(config))) == config


# what a configuration builds


def test_the_rank_of_an_adapter_is_at_most_its_width():
    assert build_adapter(AdapterConfig("lora", rank=128, scale=2.0), 6, torch.Generator()).rank == 6


@pytest.mark.parametrize("name", LOSSES)
def test_every_registered_loss_is_built(name):
    "From its entry alone: the objective's value is that of the function."
    x, y = make_data()
    loss, tx, ty = LOSSES[name], torch.tensor(x), torch.tensor(y)
    given = {option: 0.3 for option in ("margin", "tau") if option in loss.options}
    config = LossConfig(name, sampler="batch" if loss.inputs == "triplets" else None, **given)
    objective = build_objective(config, x, y, device="cpu")
    value = objective(LinearAdapter(12), tx, ty, torch.arange(40), torch.Generator()).loss
    if loss.inputs == "triplets":
        assert value > 0 and objective.parameters == ()
    else:
        assert torch.isclose(value, loss.function(tx[:40], ty[:40], *objective.parameters, **given))


def test_lam_adds_a_displacement_penalty():
    x, y = make_data()
    adapter = LinearAdapter(12)
    with torch.no_grad():
        adapter.weight.add_(0.1 * torch.randn(12, 12, generator=torch.Generator().manual_seed(0)))
    tx, ty, rows = torch.tensor(x), torch.tensor(y), torch.arange(40)
    objective = build_objective(LossConfig("supcon", tau=0.5, lam=2.0), x, y, device="cpu")
    z = adapter(tx[rows])
    expected = supcon(z, ty[rows], 0.5) + 2 * ((z - tx[rows]) ** 2).sum(1).mean()
    assert torch.isclose(objective(adapter, tx, ty, rows, torch.Generator()).loss, expected)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_fits(method):
    "Unit rows, except without normalisation; the same seed gives the same rows."
    x, y = make_data()
    rows = []
    for _ in range(2):
        init_transform, adapter, history = fit_method(small(method), x, y, device="cpu")
        z = init_transform.transform(x) if init_transform else x
        rows.append(transform(adapter, z, device="cpu") if adapter else z)
        assert (adapter is None) == (history is None) == (not uses_gradient_training(method))
    assert np.array_equal(*rows) and len(rows[0]) == len(x)
    if method != "no_sphere":
        assert np.allclose(np.linalg.norm(rows[0], axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ABLATIONS])
def test_fit_adapter_equals_fit_method_and_can_be_saved(method, tmp_path):
    "Up to rounding, and up to columns of zeros where a closed form keeps fewer."
    x, y = make_data()
    init_transform, adapter, _ = fit_method(small(method), x, y, device="cpu")
    z = init_transform.transform(x) if init_transform else x
    z = transform(adapter, z, device="cpu") if adapter else z
    merged = fit_adapter(small(method), x, y, device="cpu")
    found = transform(load_adapter(save_adapter(merged, tmp_path / "a.safetensors")), x, device="cpu")
    assert np.allclose(found[:, : z.shape[1]], z, atol=1e-5) and not merged.training
    assert not np.abs(found[:, z.shape[1] :]).max(initial=0) > 1e-6


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_strength_goes_from_the_closed_form_to_the_trained_adapter(strength):
    x, y = make_data()
    start, adapter, _ = fit_method(small("affine_nca"), x, y, device="cpu")
    u = start.transform(x)
    expected = normalize(u + strength * (u @ adapter.weight.detach().numpy().T))
    found = transform(fit_adapter(small("affine_nca"), x, y, strength=strength, device="cpu"), x, device="cpu")
    assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("method", ["affine_nca", "whitened_supcon", "lora"])
def test_strength_0_is_the_start_of_the_path_and_trains_nothing(method, monkeypatch):
    x, y = make_data()
    config = small("affine_nca" if method == "lora" else method)
    if method == "lora":
        config = replace(config, adapter=replace(config.adapter, kind="lora", rank=2, scale=1.0))
    expected, steps = fit_path(config, x, y, device="cpu").at(0.0), []
    monkeypatch.setattr(methods, "train", lambda *args, **kwargs: steps.append(args))
    found = fit_adapter(config, x, y, strength=0.0, device="cpu")
    assert not steps and not found.training and type(found) is type(expected)
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


@pytest.mark.parametrize("strength", [0.0, 0.4, 1.0])
def test_strength_of_discriminant_whitening_is_its_discrimination(strength):
    x, y = make_data()
    found = transform(fit_adapter(small("discriminant_whitening"), x, y, strength=strength, device="cpu"), x)
    assert np.allclose(found, DiscriminantWhitening(strength, shrinkage=0.5).fit(x, y).transform(x), atol=1e-5)


def few_steps(epochs=2, steps=2, batch_size=16):
    "affine_nca with few steps: of batches of 4 classes with 4 rows each."
    config = build_method_config("affine_nca", epochs=epochs)
    return replace(config, train=replace(config.train, steps_per_epoch=steps, batch_size=batch_size))


def test_a_training_of_few_steps_needs_few_rows():
    y = np.random.default_rng(0).integers(10, size=1000)
    rows = needed_rows(few_steps(), y)  # 2 * 2 * 16 places
    assert (np.diff(rows) > 0).all() and 50 <= len(rows) <= 64 and np.bincount(y[rows]).min() >= 5
    assert np.array_equal(needed_rows(few_steps(), y), rows)
    assert not np.array_equal(needed_rows(replace(few_steps(), seed=1), y), rows)
    assert np.array_equal(needed_rows(few_steps(), y[:64]), np.arange(64))
    assert np.array_equal(needed_rows(build_method_config("supcon"), np.arange(50_000) % 9), np.arange(50_000))
    assert 2**15 - 8 <= len(needed_rows(build_method_config("wccn"), np.arange(50_000) % 8)) <= 2**15
    assert len(needed_rows(build_method_config("affine_nca"), np.arange(36_864) % 9)) == 36_864 == 24 * 6 * 256


@pytest.mark.parametrize("classes", [8, 30, 33, 400])
def test_needed_rows_keep_two_rows_of_a_class(classes):
    "Also where most classes are small; classes that no batch can hold are left out."
    y = np.r_[np.arange(classes).repeat(2), np.zeros(500, int), classes]
    rows = needed_rows(few_steps(), y)
    counts = np.bincount(y[rows])
    assert len(rows) <= 64 and (counts[:classes][counts[:classes] > 0] >= 2).all()
    assert (counts > 0).sum() == min(classes + 1, 32)


@pytest.mark.parametrize("config", [few_steps(), build_method_config("discriminant_whitening")], ids=["trained", "not"])
def test_needed_rows_and_statistics_replace_all_rows(config, monkeypatch):
    monkeypatch.setattr(methods, "_SCALE_ROWS", 100)
    x, y = make_data(1000)
    statistics, rows = ClassStatistics(x.shape[1]).update(x, y), needed_rows(config, y)
    whole = fit_adapter(config, x, y, strength=0.5, device="cpu")
    part = fit_adapter(config, x[rows], y[rows], strength=0.5, statistics=statistics, device="cpu")
    assert len(rows) <= 100 and adapter_fingerprint(whole) == adapter_fingerprint(part)
    sample_alone = fit_adapter(config, x[rows], y[rows], strength=0.5, device="cpu")
    assert adapter_fingerprint(sample_alone) != adapter_fingerprint(part)


# what is refused


def whitened_ega():
    "A closed form in front of an adapter that is not linear."
    config = small("ega_released")
    return replace(config, adapter=replace(config.adapter, init_transform="wccn", shrinkage=0.5))


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: build_method_config("whitend_nca"), "whitened_nca"),
        (lambda: AdapterConfig("lora", rank=2), "scale"),
        (lambda: AdapterConfig("linear", rank=4), "rank"),
        (lambda: AdapterConfig(init_transform="wccn"), "shrinkage"),
        (lambda: AdapterConfig("linear", shrinkage=0.3), "shrinkage"),
        (lambda: LossConfig("triplet", sampler="x"), "sampler"),
        (lambda: LossConfig("supcon", tau=0.1, self_positive=True), "self_positive"),
        (lambda: LossConfig("supcon", options={"scale": 2}), "scale"),
        (lambda: LossConfig("supcon", options={"tau": 0.1}), "tau"),
        (lambda: TrainConfig(steps_per_epoch=3), "rows_per_class"),
        (lambda: TrainConfig(schedule="linear"), "schedule"),
        (lambda: MethodConfig(AdapterConfig("linear"), LossConfig("nca")), "train"),
        (lambda: MethodConfig(AdapterConfig(), LossConfig("nca"), TrainConfig()), "adapter"),
        (lambda: parse_config(MethodConfig, {"adapter": {}, "epochs": 3}), "epochs"),
        (lambda: parse_config(MethodConfig, {"adapter": {"hiden": 3}}), "hiden"),
        (lambda: parse_config(MethodConfig, {}), "adapter"),
        (lambda: fit_adapter(whitened_ega(), *make_data(), device="cpu"), "ega_released"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(make, word):
    with pytest.raises(InputError, match=word):
        make()


@pytest.mark.parametrize(
    "config",
    [
        LossConfig("mse"),
        LossConfig("triplet", margin=0.2),
        LossConfig("triplet", sampler="batch"),
        LossConfig("supcon", margin=0.2),
        LossConfig("triplet", margin=0.2, sampler="batch", tau=1),
        LossConfig("nca", sampler="batch"),
        LossConfig("cosface", tau=0.1),
    ],
)
def test_settings_that_a_loss_lacks_or_does_not_have_are_refused(config):
    with pytest.raises(InputError, match=config.kind):
        build_objective(config, *make_data(), device="cpu")
