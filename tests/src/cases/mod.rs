//! The cases, by what they are about.

pub mod collectives;
pub mod gather;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod lifecycle;
pub mod refusals;
pub mod replay;
pub mod scaling;
pub mod training;
pub mod units;

use gather8_kernels::Backend;

use crate::Case;

/// Every case with its name, for runners that go through all of them.
pub fn all<B: Backend>() -> Vec<(&'static str, Case<B>)> {
    vec![
        ("gathers_land_in_rank_order", collectives::gathers_land_in_rank_order),
        ("reductions_are_exact_on_integers", collectives::reductions_are_exact_on_integers),
        ("broadcasts_and_messages", collectives::broadcasts_and_messages),
        (
            "an_event_after_a_gather_waits_for_all",
            collectives::an_event_after_a_gather_waits_for_all,
        ),
        ("splits_work_side_by_side", collectives::splits_work_side_by_side),
        ("an_abort_reaches_everybody", collectives::an_abort_reaches_everybody),
        ("who_leaves_is_named", collectives::who_leaves_is_named),
        ("mismatches_are_told_to_all", collectives::mismatches_are_told_to_all),
        ("dropping_is_quiet", collectives::dropping_is_quiet),
        (
            "gathered_bytes_are_the_cast_of_the_whole_weight",
            gather::bytes_are_the_cast_of_the_whole_weight,
        ),
        ("a_sync_leaves_what_is_gathered", gather::a_sync_leaves_what_is_gathered),
        ("traffic_follows_the_formula", gather::traffic_follows_the_formula),
        ("decoded_weights_differ_plausibly", gather::decoded_weights_differ_plausibly),
        ("plain_weights_arrive_as_stored", gather::plain_weights_arrive_as_stored),
        ("delayed_lags_by_one_version", scaling::delayed_lags_by_one_version),
        ("a_spike_lasts_for_history_syncs", scaling::a_spike_lasts_for_history_syncs),
        ("the_first_cast_does_not_saturate", scaling::the_first_cast_does_not_saturate),
        ("untouched_slots_rest", scaling::untouched_slots_rest),
        ("larger_of_two_accumulations", scaling::larger_of_two_accumulations),
        ("nan_in_one_shard_is_named_everywhere", refusals::nan_in_one_shard_is_named_everywhere),
        ("activations_are_kept_out", refusals::activations_are_kept_out),
        ("found_inf_skips_everywhere", refusals::found_inf_skips_everywhere),
        ("nan_gradients_end_as_nan", refusals::nan_gradients_end_as_nan),
        ("swapped_gathers_are_named", refusals::swapped_gathers_are_named),
        ("different_rates_are_named", refusals::different_rates_are_named),
        ("different_microbatches_are_named", refusals::different_microbatches_are_named),
        ("a_different_no_sync_is_named", refusals::a_different_no_sync_is_named),
        ("an_ignored_error_is_named", refusals::an_ignored_error_is_named),
        ("different_models_are_named", refusals::different_models_are_named),
        ("wrong_calls_are_refused", lifecycle::wrong_calls_are_refused),
        ("unused_units_rest", lifecycle::unused_units_rest),
        ("unused_units_leave_no_trace", lifecycle::unused_units_leave_no_trace),
        ("microbatches_add", lifecycle::microbatches_add),
        ("no_sync_gives_the_same", lifecycle::no_sync_gives_the_same),
        ("tied_weights_add", lifecycle::tied_weights_add),
        ("explicit_units", units::explicit_units),
        ("messages_are_exchanged", lifecycle::messages_are_exchanged),
        ("evaluations_count_as_nothing", lifecycle::evaluations_count_as_nothing),
        ("units_are_used_in_any_order", units::units_are_used_in_any_order),
        ("replays_equal_eager_steps", replay::replays_equal_eager_steps),
        ("wrong_captures_are_refused", replay::wrong_captures_are_refused),
        ("ten_steps_match_the_unsharded_model", training::ten_steps_match_the_unsharded_model),
        ("ten_steps_match_with_a_frozen_layer", training::ten_steps_match_with_a_frozen_layer),
        ("remainders_match_f32_masters", training::remainders_match_f32_masters),
    ]
}
