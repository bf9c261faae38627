"""kto.py: a loss and metrics by hand, and y'. Training against a slow loop: test_references.py."""
import torch
from models import bad_input, cases
from torch import sigmoid, tensor

from kto import Args, Batch, Row, check_balance, draw_others, feedback_loss, metrics


def make_row(prompt, completion, is_desirable=True, other=()):
    return Row(prompt, completion, is_desirable, other, whole_prompt=prompt)


def test_apo_zero_unpaired_and_gradient_by_hand():
    """Log-ratios of a desirable and of an undesirable answer; β = 0.2."""
    rho = tensor([1.5, -0.5], requires_grad=True)
    batch = Batch(logp=rho, rho=rho, is_desirable=tensor([True, False]), length=rho)
    args = Args(loss="apo_zero_unpaired", beta=0.2, desirable_weight=1.2, undesirable_weight=0.9)
    expected = torch.stack([1.2 * (1 - sigmoid(0.2 * rho[0])), 0.9 * sigmoid(0.2 * rho[1])])
    losses = feedback_loss(batch, tensor(0.4), args), expected
    assert torch.allclose(*losses)
    assert torch.allclose(*[torch.autograd.grad(loss.sum(), rho)[0] for loss in losses])


def test_metrics_by_hand():
    batch = Batch(logp=tensor([-9.0, -8.0, -7.0]), rho=tensor([-2.0, 1.0, 0.0]), length=tensor([4.0] * 3),
                  is_desirable=tensor([True, False, False]))
    found = {name: value[mask].tolist() for name, (value, mask) in metrics(batch, Args(beta=0.5)).items()}
    assert found == {
        "rewards/accuracies": [0.0, 0.0, 0.5], "abs_logratio": [0.5, 0.25, 0.0], "nll/chosen": [2.25],
        "rewards/chosen": [-1.0], "rewards/rejected": [0.5, 0.0],
        "logps/chosen": [-9.0], "logps/rejected": [-8.0, -7.0]}


def test_labels_are_balanced_by_hand(capsys):
    rows = [make_row((1,), (2,), n < 3) for n in range(4)]
    check_balance(rows, Args())
    assert "--undesirable_weight 2.6 " in capsys.readouterr().out  # 3 / 1.17
    for part in (rows[:3], rows[3:]):
        with bad_input("all rows have the same label"):
            check_balance(part, Args())


@cases("n_prompts", [2, 3, 40])
def test_others_answer_other_prompts(n_prompts):
    rows = [make_row((i,), (i, 99))._replace(whole_prompt=(i % n_prompts,)) for i in range(40)]
    drawn = draw_others(rows, rows, Args())
    assert drawn == draw_others(rows, rows, Args()) != draw_others(rows, rows, Args(seed=1))
    assert len({row.other for row in drawn}) > 15
    held_out = draw_others(rows[:3], rows[1:], Args())
    assert all(row.other[0] > 0 for row in held_out)
    assert all(rows[row.other[0]].whole_prompt != row.whole_prompt for row in drawn + held_out)


def test_answers_to_other_prompts_are_cut():
    rows = [make_row((9,) * (1 + i), tuple(range(100 * i, 100 * i + 10 - i))) for i in range(8)]
    for row in draw_others(rows, rows, Args(max_length=11)):
        assert row.other == rows[row.other[0] // 100].completion[:11 - len(row.prompt)]
