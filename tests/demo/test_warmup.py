"""The packed warm-up equals plain supervised training, and is run once per recipe."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from shadowmask.demo import warmup
from shadowmask.demo.model import load_saved
from shadowmask.demo.warmup import Example, WarmupRecipe, answer_loss, load_warm_model, warm_up
from shadowmask.models import prepare_model
from shadowmask.tasks import RecallTask

TASK = RecallTask(num_facts=3, num_fillers=1)
RECIPE = WarmupRecipe(steps=3, documents_per_step=2, questions_per_document=2, learning_rate=1e-2)


def plain_loss(model, documents):
    """The loss without packing: every example alone, all its tokens, Hugging Face's own attention."""
    losses = []
    for example in [example for examples in documents for example in examples]:
        tokens = torch.tensor([example.prompt + example.target])
        logits = model(tokens).logits[0, len(example.prompt) - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(example.target), reduction="none"))
    return torch.cat(losses).mean()


def test_the_packed_loss_and_its_gradient_are_the_plain_ones(tiny_model, tokenizer):
    model = tiny_model.double()
    documents = warmup._batches(tokenizer, TASK, RECIPE)[0]
    assert [len(examples) for examples in documents] == [2, 2]
    expected = plain_loss(model, documents)
    expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    loss = answer_loss(prepare_model(model), documents)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for name, weight in model.named_parameters():
        # RMSNorm rounds to float32 inside, whatever the dtype of the model.
        torch.testing.assert_close(weight.grad, gradients[name], rtol=0, atol=1e-7)


def test_another_target_is_another_loss(tiny_model, tokenizer):
    model = prepare_model(tiny_model)
    documents = warmup._batches(tokenizer, TASK, RECIPE)[0]
    first = documents[0][0]
    changed = [[replace(first, target=first.target[::-1]), documents[0][1]], documents[1]]
    assert abs(answer_loss(model, documents) - answer_loss(model, changed)) > 1e-4


def test_a_single_example_needs_no_neighbour(tiny_model):
    documents = [[Example(prompt=[5, 6, 7, 8], target=[9, 0])]]
    expected = plain_loss(tiny_model, documents)
    torch.testing.assert_close(answer_loss(prepare_model(tiny_model), documents), expected)


def test_targets_end_with_eos_and_follow_the_prompt_as_the_model_reads_it(tokenizer):
    row = TASK.dataset("train", 1, RECIPE.seed + warmup.SEED_OFFSET)[0]
    example = warmup._batches(tokenizer, replace(TASK), replace(RECIPE, questions_per_document=1))[0][0][0]
    assert example.target[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(example.prompt + example.target[:-1]).replace(" ", "") == (
        row["prompt"] + TASK.target(row)
    ).replace(" ", "")


def test_training_lowers_the_loss_and_reports_every_step(tiny_model, tokenizer):
    seen = []
    recipe = replace(RECIPE, steps=12)
    losses = warm_up(tiny_model, tokenizer, TASK, recipe, lambda *report: seen.append(report))
    assert seen == [(step, 12, loss) for step, loss in enumerate(losses, start=1)]
    assert losses[-1] < 0.8 * losses[0]
    assert not tiny_model.training


def test_the_result_is_cached_by_everything_that_determines_it(saved_model, cache, monkeypatch):
    monkeypatch.setattr(warmup, "demo_model_path", lambda: saved_model)
    trained = []

    def path(task=TASK, recipe=RECIPE):
        return warmup.warm_model_path(task, recipe, lambda *report: trained.append(report))

    first = path()
    assert len(trained) == RECIPE.steps
    assert path() == first
    assert len(trained) == RECIPE.steps
    others = [path(recipe=replace(RECIPE, seed=1)), path(task=replace(TASK, num_fillers=2))]
    assert len({first, *others}) == 3
    assert sorted(cache.iterdir()) == sorted([first, *others])


def test_the_same_recipe_gives_the_same_weights_again(saved_model, monkeypatch, tmp_path):
    monkeypatch.setattr(warmup, "demo_model_path", lambda: saved_model)
    start, _ = load_saved(saved_model, torch.float32)
    weights = []
    for name in ("one", "two"):
        monkeypatch.setenv("SHADOWMASK_CACHE", str(tmp_path / name))
        model, _ = load_warm_model(TASK, RECIPE)
        weights.append(model.state_dict())
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert not all(torch.equal(weight, start.state_dict()[name]) for name, weight in weights[0].items())


def test_an_interrupted_warm_up_leaves_nothing(saved_model, cache, monkeypatch):
    monkeypatch.setattr(warmup, "demo_model_path", lambda: saved_model)

    def interrupt(step, steps, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmup.warm_model_path(TASK, RECIPE, interrupt)
    assert not list(cache.iterdir())
