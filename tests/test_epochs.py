"""What SepSA does when data are passed over several times: the length of an epoch, told or noticed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from sepsa import RLS, SelfTuning, SepSA
from sepsa.observe import epochs
from sepsa.observe.epochs import Known

N, BATCH, D = 200, 20, 5


def data(seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=generator)


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, outputs))


def pass_over(optimizer, x, y, generator=None):
    order = torch.arange(len(x)) if generator is None else torch.randperm(len(x), generator=generator)
    for rows in order.split(BATCH):
        optimizer.learn(x[rows], y[rows])


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_epoch_is_noticed_when_the_first_samples_come_again(shuffled):
    x, y = data()
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    generator = torch.Generator().manual_seed(1) if shuffled else None
    pass_over(optimizer, x, y, generator)
    assert optimizer.epoch is None
    assert (optimizer.solver.forgetting, optimizer.solver.ridge) == (1.0, 1.0)
    pass_over(optimizer, x, y, generator)
    assert N - BATCH <= optimizer.epoch <= 2 * N
    assert optimizer.solver.forgetting == epochs.forgetting(optimizer.epoch, BATCH, 8)
    assert optimizer.solver.ridge == epochs.ridge(BATCH)


def test_the_first_epoch_is_learned_as_if_there_were_no_other():
    x, y = data()
    plain = SepSA(network(), torch.optim.Adam, lr=1e-3, solver=RLS())
    for told in (None, N):
        optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3, epoch=told)
        pass_over(optimizer, x, y)
        if told is None:
            pass_over(plain, x, y)
        torch.testing.assert_close(optimizer.head.weight, plain.head.weight, rtol=0, atol=0)


def test_from_the_second_epoch_on_the_head_remembers_about_one():
    x, y = data()
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3, epoch=N)
    for _ in range(20):
        pass_over(optimizer, x, y)
    assert optimizer.solver.samples == pytest.approx(N, rel=0.15)


def test_a_solver_that_is_given_keeps_its_settings_unless_an_epoch_is_told():
    x, y = data()
    given = SepSA(network(), torch.optim.Adam, lr=1e-3, solver=RLS())
    told = SepSA(network(), torch.optim.Adam, lr=1e-3, solver=RLS(), epoch=N)
    for _ in range(3):
        pass_over(given, x, y)
        pass_over(told, x, y)
    assert (given.epoch, given.solver.forgetting) == (None, 1.0)
    assert (told.solver.forgetting, told.solver.ridge) == (1 - BATCH / N, 1.0)


def test_samples_that_do_not_come_again_change_nothing():
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    for seed in range(6):
        pass_over(optimizer, *data(seed))
    assert optimizer.epoch is None
    assert optimizer.solver.forgetting == 1.0


def test_some_repeated_rows_are_not_an_epoch():
    """The rarest of the first rows decides, so that a stream of few kinds of rows is not taken for a small table."""
    x, y = data()
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    for seed in range(6):
        fresh = data(seed + 1)
        pass_over(optimizer, torch.cat([x[:10], fresh[0]]), torch.cat([y[:10], fresh[1]]))
    assert optimizer.epoch is None


def test_the_ridge_of_a_network_that_does_not_learn_stays():
    x, y = data()
    model = network()
    model[0].requires_grad_(False)
    optimizer = SepSA(model, [(torch.optim.Adam, {}, None)], epoch=N)
    for _ in range(2):
        pass_over(optimizer, x, y)
    assert optimizer.solver.ridge == 1.0


@pytest.mark.parametrize(("loss", "kind"), [("cross-entropy", "SoftmaxNewton"), ("logistic", "LogisticNewton")])
def test_losses_name_solvers_that_choose_their_ridge_in_the_first_epoch(loss, kind):
    x, y = data()
    y = (y > 0).long().reshape(-1)
    y = y if loss == "cross-entropy" else nn.functional.one_hot(y, 2).float()
    optimizer = SepSA(network(2), torch.optim.Adam, lr=1e-3, solver=loss)
    assert type(optimizer.solver.best).__name__ == kind
    for _ in range(3):
        pass_over(optimizer, x, y)
    assert N - BATCH <= optimizer.epoch <= 2 * N
    assert optimizer.solver.ridge >= epochs.ridge(BATCH)
    assert optimizer.solver.chosen[-1].ridge == optimizer.solver.ridge


@pytest.mark.parametrize("when", [5, 15, 25])
def test_a_saved_optimizer_notices_what_the_running_one_does(when):
    x, y = data()
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    batches = [(x[rows], y[rows]) for _ in range(4) for rows in torch.arange(N).split(BATCH)]
    for batch in batches[:when]:
        optimizer.learn(*batch)
    again = SepSA(copy.deepcopy(optimizer.model), torch.optim.Adam, lr=1e-3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in batches[when:]:
        optimizer.learn(*batch)
        again.learn(*batch)
    assert optimizer.epoch == again.epoch == N
    torch.testing.assert_close(again.head.weight, optimizer.head.weight, rtol=0, atol=0)


def test_a_state_without_an_epoch_is_loaded_and_a_damaged_one_refused():
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    pass_over(optimizer, *data())
    state = optimizer.state_dict()
    older = copy.deepcopy(state)
    del older["sepsa"]["epoch"]
    optimizer.load_state_dict(older)
    state["sepsa"]["epoch"]["watched"][3][-1] = -1
    with pytest.raises(ValueError, match=r"\['watched'\]\[3\]\[4\] must be an integer of at least 0, got -1"):
        optimizer.load_state_dict(state)


def test_a_batch_that_failed_is_not_counted_as_a_repeat():
    x, y = data()
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            optimizer.learn(x[:BATCH], y[:BATCH], lambda outputs, targets: 1 / 0)
    assert optimizer._observer.epoch.known() == Known()


def test_micro_batches_forget_as_the_batch_that_they_make_up():
    x, y = data()
    whole = SepSA(network(), torch.optim.SGD, lr=0.0, epoch=N)
    parts = SepSA(network(), torch.optim.SGD, lr=0.0, epoch=N, forget_per="step")
    for _ in range(3):
        for rows in torch.arange(N).split(BATCH):
            whole.learn(x[rows], y[rows])
            for part in rows.split(BATCH // 2):
                with parts.observe(y[part]):
                    loss = nn.functional.mse_loss(parts.model(x[part]), y[part])
                loss.backward()
            parts.step()
            parts.zero_grad()
    assert parts.solver.forgetting == whole.solver.forgetting == 1 - BATCH / N


@pytest.mark.parametrize("bad", [0, -5])
def test_the_length_must_be_a_count(bad):
    with pytest.raises(ValueError, match="epoch must be an integer of at least 1"):
        SepSA(network(), torch.optim.Adam, epoch=bad)


def test_an_epoch_needs_a_solver_whose_forgetting_is_free():
    for solver in (RLS(forgetting=0.99), SelfTuning.of(RLS, forgetting=1.0)):
        with pytest.raises(ValueError, match="epoch sets the forgetting of a solver that has forgetting 1, got"):
            SepSA(network(), torch.optim.Adam, solver=solver, epoch=N)
    with pytest.raises(ValueError, match=r"solver must be a solver, None or one of .*'cross-entropy'.*, got 'hinge'"):
        SepSA(network(), torch.optim.Adam, solver="hinge")


def test_one_sample_at_a_time_and_inputs_of_any_kind_are_watched():
    x, y = data(n=40)
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for row in range(len(x)):
                optimizer.learn(x[row : row + 1], y[row : row + 1])
    assert optimizer.epoch == 40
    assert optimizer.solver.forgetting == 1 - 1 / 64  # 8 samples a feature at least
    low = SepSA(network().bfloat16(), torch.optim.Adam, lr=1e-3)
    for _ in range(2):
        pass_over(low, x.bfloat16(), y.bfloat16())
    assert low.epoch is None
