"""SepSA inside the training loops of other packages, the real ones, as examples/ writes them."""

import copy
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch

import sepsa
from breaking.damage import same


def example(name):
    """The recipe as it stands in examples/."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other packages, while they are imported
            return importlib.import_module(name)
    finally:
        sys.path.pop()


pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the other packages' own
    pytest.mark.filterwarnings("error:the head"),
    pytest.mark.filterwarnings("error:the model's output"),
]


@pytest.mark.parametrize("name", ["accelerate_loop", "lightning_loop", "transformers_trainer"])
def test_the_recipe_runs_and_leaves_nothing_behind(name, tmp_path, monkeypatch, capsys):
    from accelerate.state import AcceleratorState

    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(True)  # one for each process, of which other tests want their own
    example(name).main()
    AcceleratorState._reset_state(True)
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir())


def lightning_trainer(folder, **options):
    import lightning

    settings = {
        "default_root_dir": folder, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False,
    }  # fmt: skip
    return lightning.Trainer(**settings | options)


@pytest.mark.parametrize("way", ["Automatic", "Manual"])
def test_lightning_is_the_plain_loop(way, tmp_path):
    recipe = example("lightning_loop")
    torch.manual_seed(0)
    module = getattr(recipe, way)()
    twin = copy.deepcopy(module.network)
    lightning_trainer(tmp_path, max_epochs=2).fit(module, recipe.loader())
    optimizer = sepsa.SepSA(twin, torch.optim.Adam, lr=1e-2, samples_per_epoch=recipe.SAMPLES)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    losses = []
    for _ in range(2):
        for inputs, targets in recipe.loader():
            losses.append(optimizer.learn(inputs, targets).item())
        if way == "Automatic":
            scheduler.step()
    assert module.losses == losses
    assert same(module.network.state_dict(), twin.state_dict())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_resumes_to_the_bit(precision, tmp_path):
    recipe = example("lightning_loop")
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": precision}

    def module():
        torch.manual_seed(0)
        return recipe.Automatic(sepsa.RLS(forgetting=0.99))

    straight, first, second = module(), module(), module()
    one = lightning_trainer(tmp_path, max_epochs=4, **options)
    one.fit(straight, recipe.loader())
    half = lightning_trainer(tmp_path, max_epochs=2, **options)
    half.fit(first, recipe.loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = lightning_trainer(tmp_path, max_epochs=4, **options)
    rest.fit(second, recipe.loader(), ckpt_path=tmp_path / "half.ckpt")
    assert first.losses + second.losses == straight.losses
    assert same(second.network.state_dict(), straight.network.state_dict())
    assert same(rest.optimizers[0].state_dict(), one.optimizers[0].state_dict())
    assert straight.losses[-1] < straight.losses[0]


def test_the_fabric_recipe_learns():
    torch.manual_seed(0)
    losses = example("lightning_loop").fabric_loop()
    assert losses[-1] < losses[0]


def test_accelerate_resumes_to_the_bit(tmp_path):
    recipe = example("accelerate_loop")
    run = recipe.Run()
    run.epoch()
    run.accelerator.save_state(tmp_path)
    losses = run.epoch()
    resumed = recipe.Run()
    resumed.accelerator.load_state(tmp_path)
    assert resumed.epoch() == losses
    assert same(run.model.state_dict(), resumed.model.state_dict())
    assert same(run.optimizer.state_dict(), resumed.optimizer.state_dict())
    assert losses[-1] < losses[0]


def trained(name, folder, resume=None, **options):
    run = example("transformers_trainer").trainer(
        name, str(folder), save_strategy="epoch", save_total_limit=4, **options
    )
    run.train(resume_from_checkpoint=resume)
    return run


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("BERT", True),
        ("GPT", False),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("BERT", False), ("GPT", True))),
    ],
)
def test_the_trainer_resumes_to_the_bit(name, bf16, tmp_path):
    options = {
        "bf16": bf16, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 2,
    }  # fmt: skip
    straight = trained(name, tmp_path / "one", **options)
    first = sorted((tmp_path / "one").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[0]
    resumed = trained(name, tmp_path / "two", resume=str(first), **options)
    assert same(straight.model.state_dict(), resumed.model.state_dict())
    assert same(straight.optimizer.state_dict(), resumed.optimizer.state_dict())


def test_the_trainer_does_not_learn_what_it_evaluates(tmp_path):
    recipe = example("transformers_trainer")
    run = recipe.trainer("BERT", str(tmp_path))
    run.train()
    before = copy.deepcopy(run.model.state_dict())
    run.evaluate(recipe.Sequences(64))
    assert same(run.model.state_dict(), before)


def test_an_unmodified_trainer_is_warned(tmp_path):
    from transformers import Trainer

    recipe = example("transformers_trainer")
    run = recipe.trainer("BERT", str(tmp_path), max_steps=2)
    plain = Trainer(run.model, run.args, train_dataset=recipe.Sequences(), optimizers=(run.optimizer, None))
    with pytest.warns(
        UserWarning, match=r"the head 'classifier' has learned nothing .*sepsa.observe\(model, targets\)"
    ):
        plain.train()
