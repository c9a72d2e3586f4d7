"""Every row of the four systems has a test: one that bears its name, or one of another folder."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROWS = {"A": 13, "B": 10, "C": 10, "D": 14}
"""How many rows there are of each system."""
RULES = "precision/op_lists/test_rules.py::test_an"
DISABLED = "precision/op_lists/test_mode.py::test_disable_casts_as_a_context_manager"
OF_LAYERS = (
    "precision/test_layers.py"
    "::test_a_layer_stores_and_computes_in_its_precision_and_the_table_says_so"
)
TRUE_HALF = "precision/test_true_half.py::test"
ELSEWHERE = {
    "a4": [f"{RULES}_op_on_no_list_computes_in_the_dtype_of_its_first_input"],
    "a5": [
        f"{RULES}_op_of_the_promote_list_computes_in_the_widest_of_its_inputs",
        f"{RULES}_op_of_the_lower_list_computes_in_the_lower_dtype",
        f"{RULES}_op_of_the_fp32_list_computes_in_float32",
    ],
    "a6": [f"{RULES}_in_place_op_computes_in_the_dtype_of_what_it_writes_into"],
    "a9": [
        DISABLED,
        OF_LAYERS,
        "precision/op_lists/test_mode.py::test_clipping_and_the_optimizer_s_step_are_not_cast",
    ],
    "a10": ["cli/test_trace_command.py::test_a_verbose_run_reports_each_distinct_cast_once"],
    "a12": ["cli/test_study_commands.py::test_double_compares_every_rule_after_equal_epochs"],
    "b1": [
        "parity/test_parity.py::test_losses_and_weights_equal_a_raw_loop_bit_for_bit",
        "precision/test_switches.py::test_float32_is_ieee_inside_and_all_is_restored_after",
    ],
    "b2": [
        "precision/test_tf32_products.py::test_a_product_is_the_exact_one_of_rounded_factors",
        "precision/test_switches.py::test_a_region_inside_another_has_its_own_switches",
    ],
    "b3": [
        "parity/test_parity.py::test_fp16_mixed_equals_autocast_with_grad_scaler",
        "precision/test_loss_scale.py::test_two_optimizers_equal_grad_scalers_bit_for_bit",
    ],
    "b4": ["parity/test_parity.py::test_losses_and_weights_equal_a_raw_loop_bit_for_bit"],
    "b5": [DISABLED, OF_LAYERS],
    "b6": ["cli/test_study_commands.py::test_advise_recommends_and_writes_what_mprun_takes"],
    "b7": ["adversarial/test_numerics.py::test_the_verdict_is_what_training_shows"],
    "c2": [OF_LAYERS],
    "c3": [f"{TRUE_HALF}_parameters_gradients_and_activations_are_16_bits_and_the_output_is_not"],
    "c4": [
        "precision/test_loss_scale.py::test_float16_gradients_are_unscaled_in_float32_until_update",
        "precision/test_loss_scale.py::test_unscale_and_step_are_step_in_every_bit",
    ],
    "c7": [
        f"{TRUE_HALF}_weights_are_drawn_in_float32_and_rounded_to_nearest",
        "train/data/test_batches.py::test_an_order_depends_on_the_seed_alone",
    ],
    "c8": ["train/test_step_statistics.py::test_the_first_steps_are_warm_up"],
    "d1": [f"{TRUE_HALF}_parameters_gradients_and_activations_are_16_bits_and_the_output_is_not"],
    "d2": [OF_LAYERS],
    "d3": [
        "precision/test_rounding.py::test_float16_normals_round_up_as_often_as_the_exact_share",
        "optim/test_lost_updates.py::test_stochastic_moves_as_binomially_as_it_should",
    ],
    "d4": ["precision/test_plain_arguments.py::test_loss_scales"],
    "d5": [
        f"{TRUE_HALF}_gradients_can_be_accumulated_in_float32",
        "optim/test_lost_updates.py::test_state_takes_the_memory_it_says",
    ],
    "d6": [
        "precision/test_partials.py::test_float16_partials_equal_a_naive_loop_bit_for_bit",
        "precision/test_emulate.py::test_partials_stagnate_in_float16_forward",
    ],
    "d11": [
        "adversarial/test_fp_exceptions.py::test_what_overflows_is_named_and_nothing_else",
        "adversarial/test_fp_exceptions.py"
        "::test_a_nan_of_the_forward_pass_is_no_work_of_the_loss_scale",
    ],
    "d12": ["precision/test_emulate.py::test_over_many_steps_the_mean_is_the_float32_result"],
    "d13": [f"{TRUE_HALF}_gradients_can_be_accumulated_in_float32"],
    "d14": ["run/test_inputs.py::test_floating_inputs_are_sent_in_the_mode_s_dtype"],
}
"""Rows that tests of other folders prove, all or a part of them."""


def test_each_row_has_a_test() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    tested = set(re.findall(r"^def test_([abcd]\d+)_", text, flags=re.MULTILINE))
    assert tested | {*ELSEWHERE} == {
        f"{s.lower()}{n}" for s, rows in ROWS.items() for n in range(1, rows + 1)
    }
    for path, name in (x.split("::") for tests in ELSEWHERE.values() for x in tests):
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8"), name
