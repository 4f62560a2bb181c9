"""The learner under all interfaces: inputs and classes that come late, and earlier learners that stay as they were."""

import copy

import numpy as np
import pytest

from breaking.damage import same
from plain_learner import StreamLearner
from sepsa.learner.learner import Learner, NewInput, class_codes, indicators
from sepsa.states.schema import Entries


def new_body(inputs, outputs):
    return StreamLearner(inputs, outputs, regression=False, hidden=(4,), body="fourier")


def rows(n=40):
    """Inputs, of which the second comes at row 20, and labels, of which "c" comes at row 25."""
    X = np.random.default_rng(0).normal(size=(n, 2))
    X[:20, 1] = np.nan
    labels = ["c" if i >= 25 and i % 5 == 0 else "ab"[int(X[i, 0] > 0)] for i in range(n)]
    return X, labels


def learned(X, labels, blocks, learner):
    """The learner after these blocks of rows, and the scores before each row, -inf for classes of later blocks."""
    scores = np.full((len(X), 3), -np.inf)
    for start, stop in blocks:
        outputs, codes = class_codes(learner.outputs, labels[start:stop])
        enters = {0: 0, 20: 1}
        new = [NewInput(row - start, f"x{j}", 0.0, 1.0) for row, j in enters.items() if start <= row < stop]
        Y, known = indicators(codes, len(outputs)), 2 if stop > 20 else 1
        part = X[start:stop, :known]
        learner, before = learner.learn(new_body, part, Y, np.ones(stop - start), new, outputs=outputs)
        scores[start:stop, : len(outputs)] = before
    return learner, scores


def test_a_block_is_learned_as_its_rows_one_by_one_where_inputs_and_classes_come_late():
    X, labels = rows()
    whole, of_block = learned(X, labels, [(0, 40)], Learner())
    each, of_rows = learned(X, labels, [(i, i + 1) for i in range(40)], Learner())
    assert whole.outputs == each.outputs == {label: k for k, label in enumerate(dict.fromkeys(labels))}
    assert same(whole.state_dict(), each.state_dict())
    np.testing.assert_array_equal(of_rows, of_block)
    assert (of_block[0] == -np.inf).all()  # no class was known
    assert (of_block[:25, whole.outputs["c"]] == -np.inf).all()
    assert of_block[39, whole.outputs["c"]] > -np.inf


def test_what_arrives_leaves_the_learner_before_as_it_was():
    X, labels = rows()
    before, _ = learned(X, labels, [(0, 20)], Learner())
    state = copy.deepcopy(before.state_dict())
    after, _ = learned(X, labels, [(20, 40)], before)
    assert same(before.state_dict(), state)
    assert (after.body.engine.inputs, after.body.engine.outputs) == (2, 3)
    assert after.learn(new_body, X[39:], np.eye(3)[:1], np.ones(1))[0] is after  # nothing arrives: nothing is copied


def test_before_the_first_row_scores_are_zero_and_no_class_has_a_probability():
    assert Learner(outputs={"y": 0}).predict(np.ones((2, 3))).tolist() == [[0.0], [0.0]]
    assert Learner().probabilities(Learner().predict(np.ones((2, 3)))).shape == (2, 0)


def test_a_state_has_a_name_for_each_output():
    learner, _ = learned(*rows(), [(0, 40)], Learner())
    state = learner.state_dict() | {"outputs": learner.state_dict()["outputs"][:2]}
    with pytest.raises(ValueError, match=r"\['body'\] must be one of as many inputs and outputs as there are names"):
        Learner.loaded(Entries("state", {"learner": state}), lambda _: new_body(1, 1), lambda _: None)
