"Protocols and published numbers: counts of the published runs, every experiment on random rows, and the command."

import concurrent.futures
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ega import cli
from ega.data.arrays import InputError, normalize
from ega.data.datasets import DATASETS, released_class_split
from ega.data.encoders import encoder_spec
from ega.data.packs import EmbeddingSet, path_of_pack, write_pack
from ega.experiments import cli as paper_cli
from ega.experiments import runs
from ega.experiments.grids import ResultStore
from ega.experiments.protocols import (
    PAPER_BENCHMARKS,
    PAPER_PACKS,
    Protocol,
    build_split,
    evaluate_neighbours,
    get_benchmark,
    get_protocol,
    load_embedding_sets,
    published_experiments,
    published_split_counts,
    split_counts,
)
from ega.experiments.published import (
    _NotRun,
    build_cells,
    configs_for,
    deviation_notes,
    embed_command,
    format_cells,
    format_overview,
    list_tables_and_figures,
    read_published,
    reproduced_value,
    required_packs,
    run_cells,
)
from ega.experiments.runs import RunConfig, evaluate_settings, run_experiment
from ega.measure.search import Neighbours, SearchConfig
from ega.method.config import config_to_dict, parse_config

root = Path(__file__).resolve().parents[2]
printed = read_published(root / "data/published.csv")
UNSEEN = {
    "aircraft": [1, 2, 14, 20, 21, 23, 29, 37, 51, 52, 60, 63, 71, 74, 82, 84, 86, 87, 91, 92],
    "food101": [1, 2, 14, 20, 21, 23, 29, 37, 51, 52, 59, 60, 63, 71, 74, 82, 85, 86, 87, 92, 99],
    "pet": [7, 10, 14, 18, 20, 22, 28, 30],
}
UNSEEN["cifar100"] = UNSEEN["aircraft_train_test"] = UNSEEN["aircraft"]


def sizes(classes, seen_rows, unseen, unseen_rows):
    "Rows a class: as even as the totals of seen and unseen classes allow."
    n = np.empty(classes, int)
    for members, rows in ((np.setdiff1d(np.arange(classes), unseen), seen_rows), (unseen, unseen_rows)):
        n[members] = rows // len(members)
        n[members[: rows % len(members)]] += 1
    return n


def imagenet_sizes():
    "34,745 rows of 1,000 classes; 6,914, 6,988 and 7,030 of them are in the unseen classes of seeds 42, 123 and 456."
    unseen = [set(released_class_split(np.arange(1000), seed=s).unseen.tolist()) for s in (42, 123, 456)]
    n = np.full(1000, 35)
    alone = [sorted(unseen[i] - unseen[(i + 1) % 3] - unseen[(i + 2) % 3]) for i in range(3)] + [
        sorted(set(range(1000)) - set.union(*unseen))
    ]
    for members, change in zip(alone, (6_914 - 7_000, 6_988 - 7_000, 7_030 - 7_000, 34_745 - 35_000 + 86 + 12 - 30)):
        at = [members[i % len(members)] for i in range(abs(change))]
        np.add.at(n, at, np.sign(change))
    return n


def labels(pack):
    "Labels of a pack of the paper's size, in mixed order as in a file."
    flat = {"cifar100": (100, 10_000), "cifar10": (10, 10_000)}
    if pack in flat:
        n = np.full(flat[pack][0], flat[pack][1] // flat[pack][0])
    elif pack == "imagenet":
        n = imagenet_sizes()
    else:
        n = {
            "aircraft": lambda u: sizes(100, 2_664, u, 669),
            "aircraft_train_test": lambda u: sizes(100, 5_332, u, 1_335),
            "food101": lambda u: sizes(101, 20_000, u, 5_250),
            "pet": lambda u: sizes(37, 5_771, u, 1_578),
        }[pack](np.array(UNSEEN[pack]))
    return np.random.default_rng(7).permutation(np.repeat(np.arange(len(n)), n))


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    "Random unit rows in four dimensions, as many as the released runs had."
    folder, rng = tmp_path_factory.mktemp("packs"), np.random.default_rng(0)
    for pack, encoder in {
        (s, PAPER_BENCHMARKS[b].encoder)
        for e in published_experiments().values()
        for b, *_ in e.sets
        for s in (PAPER_BENCHMARKS[b].train, PAPER_BENCHMARKS[b].unseen)
    }:
        y = labels(pack)
        assert len(y) == PAPER_PACKS[pack].rows
        write_pack(
            EmbeddingSet(normalize(rng.normal(size=(len(y), 4))), y, meta={"set": pack, "encoder": encoder}),
            path_of_pack(pack, encoder, folder),
            dtype="float32",
        )
    return folder


def split_for(packs, name, benchmark, seed=42):
    config = SimpleNamespace(
        task=published_experiments()[name].task, benchmark=benchmark, protocol=f"released/{name}", split_seed=seed
    )
    es, other = load_embedding_sets(config, packs)
    return build_split(config, es, other), es, other


SETS = [
    (name, b, s)
    for name, e in published_experiments().items()
    for b, *_ in e.sets
    for s in (e.seeds if e.seed_splits else (42,))
]


def test_table_has_every_experiment():
    assert {k.rstrip("b") for k in published_experiments()} == {f"E{i}" for i in range(1, 24)}
    assert all((e.task is None) == bool(e.not_run_reason) == (not e.sets) for e in published_experiments().values())


@pytest.mark.parametrize("name,benchmark,seed", SETS)
def test_released_splits_have_the_published_counts_and_classes(packs, name, benchmark, seed):
    s, es, other = split_for(packs, name, benchmark, seed)
    assert split_counts(s) == published_split_counts(name, benchmark, seed)
    p, b = published_experiments()[name].protocol, PAPER_BENCHMARKS[benchmark]
    if p.leak:
        assert set(s.seen_queries) <= set(s.fit) and len(s.fit) == es.n
        with pytest.raises(InputError, match="fit and seen_queries share"):
            s.check(es.y)
    elif published_experiments()[name].task == "in_distribution":
        assert not set(s.fit) & set(s.seen_queries)
    elif b.train == b.unseen:
        unseen = set(other.y[np.r_[s.unseen_gallery, s.unseen_queries]].tolist())
        assert not unseen & set(es.y[s.fit].tolist()) and (b.train not in UNSEEN or sorted(unseen) == UNSEEN[b.train])
    if p.row_rule == "file":
        assert s.seen_queries.tolist() == list(range(8_000, 10_000)) and s.fit.tolist() == list(range(8_000))


def test_counts_and_nlist_of_the_table():
    "The numbers are typed a second time, so that a typing error in the table is found."
    want = {
        ("E8", "aircraft", 42): (2_664, 501, 168),
        ("E8", "food101", 42): (20_000, 3_937, 1_313),
        ("E7", "cifar100>cifar10", 42): (10_000, 7_500, 2_500),
        ("E9", "imagenet", 42): (27_831, 5_185, 1_729),
        ("E9", "imagenet", 123): (27_757, 5_241, 1_747),
        ("E9", "imagenet", 456): (27_715, 5_272, 1_758),
        ("E19", "pet", 42): (5_771, 1_183, 395),
        ("E11", "cifar100", 42): (8_000, 1_500, 500),
        ("E6", "imagenet", 42): (27_796, 5_211, 1_738),
        ("E4", "cifar100", 42): (10_000, 7_500, 2_500),
    }
    for (e, s, seed), counts in want.items():
        assert published_split_counts(e, f"{s}@clip_vit_b32", seed) == counts
    assert published_split_counts("E13", "aircraft_train_test@dinov2_large") == (5_332, 1_001, 334)
    nlist = {
        e: published_experiments()[e].protocol.index.nlist
        for e in published_experiments()
        if published_experiments()[e].protocol
    }
    assert nlist == {
        **dict.fromkeys(("E1", "E4", "E5", "E6", "E7", "E8", "E9", "E13", "E18", "E18b", "E19", "E21", "E22"), 10),
        **dict.fromkeys(("E2", "E3", "E12", "E16", "E17", "E17b"), 100),
        "E14": 50,
        "E10": None,
        "E11": None,
    }


def trial(config):
    "The same run at one epoch and sixteen hidden units."
    adapter = replace(config.adapter, hidden=16) if config.adapter.hidden else config.adapter
    return replace(config, adapter=adapter, train=replace(config.train, epochs=1) if config.train else None)


def one_of_each():
    "For each experiment and set the last method that is printed; the losses differ among them."
    found = {}
    for r in printed.itertuples():
        if r.dataset.startswith("worst"):
            continue
        try:
            c = configs_for(r, "released")[-1]
        except _NotRun:
            continue
        found[r.experiment, c.benchmark] = c
    return [(e, c) for (e, _), c in found.items()]


@pytest.mark.parametrize(
    "name,config", one_of_each(), ids=lambda v: v if isinstance(v, str) else f"{v.benchmark}-{v.method}"
)
def test_released_experiment_runs(packs, name, config):
    rows = run_experiment(trial(config), packs, device="cpu")
    e, p = published_experiments()[name], published_experiments()[name].protocol
    own = rows[rows.query_set == ("unseen" if e.task == "unseen" else "seen")]
    _, gallery, queries = published_split_counts(name, config.benchmark, config.seed)
    assert (
        set(own.n) == {queries}
        and set(own.gallery) == {gallery}
        and set(own.protocol) == {f"released/{name}"}
        and set(own.nlist) == {p.index.nlist or 0}
    )
    assert sorted(zip(own.nprobe, own.k)) == sorted(
        (n, k) for n in ((1, 5, 10) if p.index.nlist else (0,)) for k in (1, 3, 5, 10)
    )
    assert (
        own[["lp_at_1", "lp_at_1_ivf", "ar_at_1"]].stack().between(0, 1).all()
        and (own[own.nprobe.isin([0, p.index.nlist or 0])].ar_at_1 > 0.999).all()
    )
    assert len(own.active_ratio_history.iloc[0]) == (config.train is not None)


def test_all_but_the_experiment_of_unnormalised_rows_are_run(packs):
    all_, tried = published_experiments(), {name for name, _ in one_of_each()}
    assert {name for name in all_ if all_[name].task} - tried == {"E2"}
    base = next(c for _, c in one_of_each() if c.train is None)
    with pytest.raises(InputError, match="packs hold unit rows"):
        run_experiment(replace(base, protocol="released/E2", task="in_distribution"), packs)


# ---- settings


def test_added_fields_change_the_run_id_only_when_set():
    base = runs.build_config("unseen", "cub100", "ega_released")
    assert not {"self_positive", "schedule"} & (
        config_to_dict(base)["loss"].keys() | config_to_dict(base)["train"].keys()
    )
    changed = [
        replace(base, loss=replace(base.loss, self_positive=True)),
        replace(base, train=replace(base.train, schedule="constant")),
    ]
    assert len({c.run_id for c in (base, *changed)}) == 3 and all(
        parse_config(RunConfig, config_to_dict(c)) == c for c in changed
    )


def test_deviations_change_the_configurations():
    "A few deviations, read from the configurations of published numbers."

    def of(protocol, artefact, dataset, method):
        return configs_for(
            next(r for r in printed.itertuples() if (r.artefact, r.dataset, r.method) == (artefact, dataset, method)),
            protocol,
        )[0]

    code, text = (of(p, "tab:indist_summary", "CIFAR-100", "LoRA+Triplet") for p in ("released", "paper"))
    assert (code.adapter.rank, text.adapter.rank, code.adapter.scale, text.adapter.scale) == (8, 128, 2, 0.125)  # D2
    assert get_protocol(code.protocol).leak and not get_protocol(text.protocol).leak  # D3
    assert code.loss.self_positive and code.loss.sampler == "dataset" and text.loss.sampler == "batch"  # D25
    ega = of("released", "tab:indist_summary", "CIFAR-100", "EGA")
    assert (
        ega.adapter.kind == "ega_released"
        and of("paper", "tab:indist_summary", "CIFAR-100", "EGA").adapter.kind == "ega_paper"
    )  # D1
    assert (ega.train.lr, ega.train.batch_size, ega.train.epochs, ega.train.schedule) == (
        1e-5,
        1024,
        120,
        "constant",
    ) and not ega.loss.self_positive  # D22
    assert (
        of("released", "fig:mechanism", "Aircraft", "EGA").train.schedule == "constant"
        and of("released", "fig:mechanism", "Aircraft", "ICon").train.schedule == "cosine"
    )  # D18
    assert (
        get_benchmark(of("released", "tab:ega_backbones", "CIFAR-100", "EGA").benchmark).train == "cifar100"
        and of("released", "tab:sensitivity", "CIFAR-100", "EGA m=0.1").loss.margin == 0.1
    )
    assert of("released", "tab:lora_rank", "Aircraft", "LoRA+Triplet r=512").adapter == replace(
        code.adapter, rank=512, scale=16 / 512
    )
    assert (
        of("paper", "tab:ood_summary", "Aircraft", "ICon").loss.kind == "icon"
        and of("released", "tab:ood_summary", "Aircraft", "ICon").loss.kind == "icon_self_included"
    )  # D29
    assert (
        of("paper", "tab:ood_summary", "ImageNet-1K", "EGA").train.batch_size == 512
        and of("released", "tab:ood_summary", "ImageNet-1K", "EGA").train.epochs == 100
    )
    siglip = next(
        r
        for r in printed.itertuples()
        if r.artefact == "tab:ega_backbones" and r.dataset == "Aircraft" and r.backbone.startswith("SigLIP")
    )
    assert [configs_for(siglip, p)[0].benchmark.split("@")[1] for p in ("released", "paper")] == [
        "siglip_large_patch16_384",
        "siglip_so400m",
    ]  # D20


# ---- rules


def test_evaluate_neighbours_equals_a_loop():
    rng = np.random.default_rng(0)
    yb, yq = rng.integers(5, size=40), rng.integers(5, size=30)
    I, E = (np.stack([rng.permutation(40)[:6] for _ in range(30)]) for _ in "ab")
    I[::3, 4:] = -1
    D = np.sort(rng.random((30, 6)), 1)
    for k in (1, 3, 6):
        lp, ar = evaluate_neighbours(Neighbours(D, I), Neighbours(D, E), yb, yq, k, "as_returned")
        assert np.allclose(
            lp, [np.mean([yb[i] == q for i in row[:k]]) for row, q in zip(I, yq)]
        )  # yb[-1] where nothing was found
        assert np.allclose(ar, [len(set(row[:k]) & set(e[:k])) / k for row, e in zip(I, E)])
    last = yb[-1] == yq[::3]
    miss = evaluate_neighbours(Neighbours(np.where(I < 0, np.inf, D), I), Neighbours(D, E), yb, yq, 6, "ties_averaged")[
        0
    ][::3]
    assert last.any() and np.allclose(
        evaluate_neighbours(Neighbours(D, I), Neighbours(D, E), yb, yq, 6, "as_returned")[0][::3] - miss, last * 2 / 6
    )


def test_settings_evaluated_together_equal_single_ones():
    rng = np.random.default_rng(1)
    zb, zq = normalize(rng.normal(size=(300, 6))), normalize(rng.normal(size=(80, 6)))
    yb, yq = rng.integers(6, size=300), rng.integers(6, size=80)
    p = Protocol(index=SearchConfig("ivf", 1, 10, 1), nprobes=(1, 5, 10), ks=(1, 3))
    many = evaluate_settings(zq, zb, yq, yb, p)
    assert (
        sorted((s.nprobe, s.k, s.nlist) for s in many) == sorted((n, k, 10) for n in (1, 5, 10) for k in (1, 3))
        and next(iter(many)) == p.index
    )
    for s, v in many.items():
        alone = evaluate_settings(zq, zb, yq, yb, Protocol(index=s))[s]
        assert all(np.allclose(a, b) for a, b in zip(v, alone))
    exact = evaluate_settings(zq, zb, yq, yb, Protocol(index=SearchConfig("exact"), ks=(1, 5)))
    assert all((v.ivf_ar == 1).all() and np.array_equal(v.hit, v.ivf_hit) for v in exact.values())


# ---- packs and their commands


def test_embed_commands_parse_and_name_their_pack():
    needed = {
        one
        for p in ("paper", "released", "strict")
        for a in list_tables_and_figures(printed)
        for cell in build_cells(printed, a, p)
        for one in required_packs(cell.configs)
    }
    assert needed == {(s, b.encoder) for b in PAPER_BENCHMARKS.values() for s in (b.train, b.unseen)}
    for pack, encoder in needed:
        args = cli.parser().parse_args(shlex.split(embed_command(pack, encoder))[1:])
        card = DATASETS[args.dataset]
        splits = tuple(args.splits or card.default)
        assert (
            args.run is cli._embed
            and set(splits) <= set(card.splits)
            and encoder_spec(args.encoder)[0] == encoder
            and args.out == "build/packs"
        )
        assert pack == (
            args.dataset if splits == card.default else f"{args.dataset}_{'_'.join(splits)}"
        )  # as open_dataset names its source
        if splits == card.default and card.rows:
            assert PAPER_PACKS[pack].rows == card.rows


@pytest.mark.parametrize("protocol", ["paper", "released", "strict"])
def test_every_artefact_prints_in_80_columns(protocol):
    for a in list_tables_and_figures(printed):
        cells = build_cells(printed, a, protocol)
        text = format_cells(cells, None, "nowhere")
        assert max(map(len, text.splitlines())) < 80 and "Traceback" not in text
        assert text.count("needs pack") == sum(bool(c.configs) for c in cells) and text.count("not run (") == sum(
            not c.configs for c in cells
        )
        for one in required_packs([c for cell in cells for c in cell.configs]):
            assert embed_command(*one) in text.replace(" \\\n         ", " ")
    assert max(map(len, format_overview(printed, protocol, "nowhere").splitlines())) < 80


# ---- published beside ours


@pytest.fixture
def one_process(monkeypatch):
    "Runs are made in this process: a worker would need longer to import torch than to make them."

    class Here(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, *_):
            super().__init__(1)

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Here)


@pytest.fixture(scope="module")
def clone(tmp_path_factory, packs):
    "A folder that `find_repository` accepts, with the published numbers."
    top = tmp_path_factory.mktemp("clone")
    for f in ("nbs", "data/packs"):
        (top / f).mkdir(parents=True)
    (top / "data/published.csv").write_bytes((root / "data/published.csv").read_bytes())
    return top


def test_reproduce_runs_resumes_and_prints_published_beside_ours(clone, packs, one_process, monkeypatch, capsys):
    monkeypatch.chdir(clone)
    args = [
        "reproduce",
        "--protocol",
        "released",
        "--experiments",
        "tab:pet_ood",
        "--epochs",
        "1",
        "--packs",
        str(packs),
        "--workers",
        "1",
        "--quiet",
    ]
    assert paper_cli.main([*args, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert plan.count("to be run") == 6 and not (clone / "build").exists()
    assert paper_cli.main(args) == 0
    first = capsys.readouterr().out
    assert paper_cli.main(args) == 0
    again = capsys.readouterr().out
    assert "3 runs made now" in first and "0 runs made now" in again and first.replace("3 runs", "0 runs") == again
    assert (
        max(map(len, first.splitlines())) < 80
        and "protocol released, a trial (--epochs 1)" in first
        and first.count("    395\n") == 6
        and first.count("[.") == 6
        and "warning" not in first
    )
    rows = ResultStore(clone / "build/paper", "released").read()
    assert (
        paper_cli.main(
            [
                "rerun",
                rows.run_id[rows.method == "frozen"].iloc[0],
                "--results",
                str(clone / "build/paper"),
                "--packs",
                str(packs),
            ]
        )
        == 0
    )
    assert "first neighbours changed 0" in capsys.readouterr().out


def test_missing_packs_are_listed_and_nothing_is_run(clone, packs, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(clone)
    assert paper_cli.main(["reproduce", "--protocol", "paper", "--experiments", "tab:ood_summary"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("needs pack") == 54
        and "ega embed --encoder clip-vit-b32 --dataset cifar10 --splits train test" in out
        and "0 runs made now" in out
    )
    assert paper_cli.main(["reproduce", "--protocol", "released"]) == 0
    assert "tab:ood_summary             54        0    66   1, 2, 3, 4, 5" in capsys.readouterr().out


def small(folder, n=7_200):
    y = np.arange(n) % 37
    write_pack(
        EmbeddingSet(
            normalize(np.random.default_rng(0).normal(size=(n, 4))), y, meta={"set": "pet", "encoder": "clip_vit_b32"}
        ),
        path_of_pack("pet", "clip_vit_b32", folder),
    )


def test_pack_of_another_size_gives_a_warning(tmp_path, one_process):
    small(tmp_path)
    cells = build_cells(printed, "tab:pet_ood", "released", epochs=1)
    cells = [replace(c, configs=tuple(map(trial, c.configs))) for c in cells]
    size, counts = deviation_notes(cells, tmp_path)
    assert "7,200 labelled rows, 7,349 were expected" in size and "in the published run 5,771, 1,183, 395" in counts
    store = ResultStore(tmp_path, "r")
    assert run_cells(
        cells[:1], store, tmp_path, workers=1, progress=False
    ) == 1 and "warning: pet by clip_vit_b32" in format_cells(cells, store.read(), tmp_path)


def test_compare_cell_gives_mean_population_sd_and_minimum_over_benchmarks(packs):
    cells = build_cells(printed, "tab:ood_summary", "released")
    wanted = [c for c in cells if c.row.method == "EGA" and c.row.metric == "LP"]
    rng, rows = np.random.default_rng(0), []
    for c in dict.fromkeys(c for cell in wanted for c in cell.configs):
        n = 60 if "imagenet" not in c.benchmark else 60 + c.seed % 7
        hit = rng.integers(2, size=n).astype(np.float32) * (0.5 if "aircraft" in c.benchmark else 1)
        rows.append(
            dict(
                run_id=c.run_id,
                benchmark=c.benchmark,
                split_seed=c.split_seed,
                seed=c.seed,
                query_set="unseen",
                k=1,
                nprobe=1,
                ivf_hit=hit,
                query_class=np.arange(n) % 6,
            )
        )
    results = pd.DataFrame(rows)
    for cell in wanted[:-1]:
        means = [r.ivf_hit.mean() for r in results[results.benchmark == cell.configs[0].benchmark].itertuples()]
        ours = reproduced_value(cell, results, n_boot=200)
        assert (
            len(means) == 3
            and np.isclose(ours["value"], np.mean(means))
            and np.isclose(ours["sd"], np.std(means))
            and ours["low"] < ours["value"] < ours["high"]
        )
        assert ours["n"] == (
            60 if "imagenet" not in cell.configs[0].benchmark else sum(60 + s % 7 for s in (42, 123, 456))
        )
    worst = reproduced_value(wanted[-1], results, n_boot=200)
    assert (
        wanted[-1].row.dataset == "worst of 4"
        and np.isclose(worst["value"], min(reproduced_value(c, results, n_boot=2)["value"] for c in wanted[:-1]))
        and worst["runs"] == 12
    )
    assert reproduced_value(wanted[0], results.iloc[1:]) is None


def test_active_ratio_is_in_the_unit_of_the_paper(packs):
    cell, open_, epoch = (
        next(
            c
            for a in ("tab:rho_datasets", "fig:mechanism")
            for c in build_cells(printed, a, "released")
            if c.row.dataset == "Aircraft" and match(c.row)
        )
        for match in (lambda r: "rho (" in r.metric, lambda r: "zero" in r.metric, lambda r: r.method == "EGA epoch 20")
    )
    assert cell.configs[0].train == epoch.configs[0].train
    history = np.linspace(0.4, 0.03, 150)
    results = pd.DataFrame(
        [
            dict(run_id=i, active_ratio_history=history, active_ratio_final=history[-1])
            for i in {c.run_id for x in (cell, epoch) for c in x.configs}
        ]
    )
    assert (
        np.isclose(reproduced_value(cell, results)["value"], 3)
        and np.isclose(reproduced_value(open_, results)["value"], 97)
        and np.isclose(reproduced_value(epoch, results)["value"], history[19])
    )
    short = results.assign(active_ratio_history=[history[:5]] * len(results))
    lines = format_cells([epoch], short, "nowhere").splitlines()
    assert any(line.endswith(" -") and "EGA epoch 20" in line for line in lines)


@pytest.mark.parametrize("protocol,queries", [("paper", 100), ("strict", 400)])
def test_cells_run_under_paper_and_strict(tmp_path, protocol, queries):
    "2,000 rows of 100 classes: a quarter of the unseen rows are queries, or each is one against all others."
    pack, encoder = "aircraft_train_val_test", "clip_vit_b32"
    y = np.arange(2_000) % 100
    write_pack(
        EmbeddingSet(
            normalize(np.random.default_rng(0).normal(size=(2_000, 4))), y, meta={"set": pack, "encoder": encoder}
        ),
        path_of_pack(pack, encoder, tmp_path),
    )
    cells = [
        c
        for c in build_cells(printed, "tab:ood_summary", protocol)
        if c.row.dataset == "Aircraft" and c.row.method in ("CLIP", "SRL")
    ]
    cells = [replace(c, configs=tuple(map(trial, c.configs[:1]))) for c in cells]
    results = pd.concat(
        [run_experiment(c, tmp_path, device="cpu") for c in dict.fromkeys(c for cell in cells for c in cell.configs)]
    )
    for cell in cells:
        ours = reproduced_value(cell, results)
        row = results[
            (results.run_id == cell.configs[0].run_id)
            & (results.query_set == "unseen")
            & (results.k == 1)
            & (results.nprobe == 1)
        ].iloc[0]
        assert ours["n"] == queries and np.isclose(
            ours["value"],
            row.ar_at_1 if cell.row.metric == "AR" else row.lp_at_1 if protocol == "strict" else row.lp_at_1_ivf,
            atol=1e-6,
        )
    assert {c.adapter.kind for cell in cells for c in cell.configs} == {
        "identity",
        "ega_paper" if protocol == "paper" else "ega_released",
    }
