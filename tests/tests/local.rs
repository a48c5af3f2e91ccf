//! Every case on the CPU, ranks as threads, at worlds 1 to 8.

use gather8_conformance::threads::{WORLDS, run};

macro_rules! cases {
    ($($module:ident :: $case:ident),* $(,)?) => {
        $(
            #[test]
            fn $case() {
                for world in WORLDS {
                    run(world, gather8_conformance::cases::$module::$case);
                }
            }
        )*

        /// The list here and the list for other runners are the same.
        #[test]
        fn the_list_is_whole() {
            let here = [$(stringify!($case)),*];
            let all = gather8_conformance::cases::all::<gather8_kernels::cpu::Cpu>();
            assert_eq!(here.len(), all.len(), "a case is missing from one list");
        }
    };
}

cases! {
    collectives::gathers_land_in_rank_order,
    collectives::reductions_are_exact_on_integers,
    collectives::broadcasts_and_messages,
    collectives::an_event_after_a_gather_waits_for_all,
    collectives::splits_work_side_by_side,
    collectives::an_abort_reaches_everybody,
    collectives::who_leaves_is_named,
    collectives::mismatches_are_told_to_all,
    collectives::dropping_is_quiet,
    gather::bytes_are_the_cast_of_the_whole_weight,
    gather::a_sync_leaves_what_is_gathered,
    gather::traffic_follows_the_formula,
    gather::decoded_weights_differ_plausibly,
    gather::plain_weights_arrive_as_stored,
    scaling::delayed_lags_by_one_version,
    scaling::a_spike_lasts_for_history_syncs,
    scaling::the_first_cast_does_not_saturate,
    scaling::untouched_slots_rest,
    scaling::larger_of_two_accumulations,
    refusals::nan_in_one_shard_is_named_everywhere,
    refusals::activations_are_kept_out,
    refusals::found_inf_skips_everywhere,
    refusals::nan_gradients_end_as_nan,
    refusals::swapped_gathers_are_named,
    refusals::different_rates_are_named,
    refusals::different_microbatches_are_named,
    refusals::a_different_no_sync_is_named,
    refusals::an_ignored_error_is_named,
    refusals::different_models_are_named,
    lifecycle::wrong_calls_are_refused,
    lifecycle::unused_units_rest,
    lifecycle::unused_units_leave_no_trace,
    lifecycle::microbatches_add,
    lifecycle::no_sync_gives_the_same,
    lifecycle::tied_weights_add,
    units::explicit_units,
    lifecycle::messages_are_exchanged,
    lifecycle::evaluations_count_as_nothing,
    units::units_are_used_in_any_order,
    replay::replays_equal_eager_steps,
    replay::wrong_captures_are_refused,
    training::ten_steps_match_the_unsharded_model,
    training::ten_steps_match_with_a_frozen_layer,
    training::remainders_match_f32_masters,
}
