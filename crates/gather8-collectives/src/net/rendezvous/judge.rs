//! Whether a caller that knows the token fits to the others, and what follows if it does not.

use super::Party;
use crate::net::handshake::{self, Greeting, PROTOCOL, Process, Purpose, readable};

/// What is to be done with a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It comes in; in place of an earlier attempt of its own, if there is one.
    Welcome,
    /// It is sent away, and nothing else happens.
    Away(String),
    /// It is sent away. Either it belongs to another job, or it is the rank that this one lacks:
    /// then waiting for that rank is in vain.
    Stray(String),
    /// The ranks can never come together: all are told.
    Over(String),
}

/// Holds a caller's claims, which are proved to come from someone who knows the token, against this
/// rank's. `guest` is the process that has come as the rank which the caller claims to be.
pub(crate) fn judge(party: &Party, greeting: &Greeting, guest: Option<&Process>) -> Verdict {
    let Greeting { version, purpose, from, to, world, job, build, process, .. } = greeting;
    if *version != PROTOCOL {
        return Verdict::Over(handshake::version_text(*from, *version, 0, PROTOCOL));
    }
    if *purpose != Purpose::Rendezvous || *to != party.rank {
        return Verdict::Away(format!("rank {from} has come to the wrong place"));
    }
    if *job != party.job {
        return Verdict::Stray(format!(
            "rank {from} was started for another job than rank 0: give all ranks of a job one GATHER8_JOB, and each job an address of its own"
        ));
    }
    if *build != handshake::build() {
        return Verdict::Over(format!(
            "rank {from} runs gather8 {}, rank 0 {}: run the same build everywhere",
            readable(build),
            readable(&handshake::build())
        ));
    }
    if *world != party.world {
        return Verdict::Over(format!(
            "rank {from} was told of {world} ranks, rank 0 of {}: start all with the same number, and each job with a GATHER8_JOB of its own",
            party.world
        ));
    }
    if *from == 0 {
        return Verdict::Away("a second process says that it is rank 0".to_owned());
    }
    if *from >= *world {
        return Verdict::Away(format!("rank {from} lies outside a world of {world}"));
    }
    match guest {
        Some(guest) if guest != process => Verdict::Over(format!(
            "rank {from} was claimed by two processes ({guest} and {process}): give each rank a number of its own, and each job a GATHER8_JOB of its own"
        )),
        _ => Verdict::Welcome,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;

    #[test]
    fn every_claim_counts() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _enter = runtime.enter();
        let patience = Duration::from_secs(1);
        let deadline = Instant::now() + patience;
        let party = Party { rank: 0, world: 4, job: [7; 32], deadline, patience };
        let process = Process::own().unwrap();
        let good = Greeting {
            version: PROTOCOL,
            purpose: Purpose::Rendezvous,
            from: 3,
            to: 0,
            world: 4,
            job: [7; 32],
            port: 4000,
            build: handshake::build(),
            process,
        };
        let other = Process::own().unwrap();
        assert_eq!(judge(&party, &good, None), Verdict::Welcome);
        assert_eq!(judge(&party, &good, Some(&process)), Verdict::Welcome);
        let two = judge(&party, &good, Some(&other));
        assert!(matches!(&two, Verdict::Over(text) if text.contains("two processes")), "{two:?}");

        let over = |greeting: &Greeting, expected: &str| {
            let verdict = judge(&party, greeting, None);
            let ends = matches!(&verdict, Verdict::Over(text) if text.starts_with(expected));
            assert!(ends, "{verdict:?}");
        };
        let newer = Greeting { version: PROTOCOL + 1, ..good.clone() };
        over(&newer, "rank 3 speaks version 3 of the protocol, rank 0 version 2: run the same");
        let older = Greeting { build: *b"0.0.9\0\0\0\0\0\0\0\0\0\0\0", ..good.clone() };
        over(
            &older,
            &format!("rank 3 runs gather8 0.0.9, rank 0 {}: run", env!("CARGO_PKG_VERSION")),
        );
        over(&Greeting { world: 5, ..good.clone() }, "rank 3 was told of 5 ranks, rank 0 of 4: ");

        let stray = judge(&party, &Greeting { job: [8; 32], ..good.clone() }, None);
        assert!(
            matches!(&stray, Verdict::Stray(text) if text.contains("another job")),
            "{stray:?}"
        );
        for away in [
            Greeting { from: 0, ..good.clone() },
            Greeting { from: 4, ..good.clone() },
            Greeting { to: 1, ..good.clone() },
            Greeting { purpose: Purpose::Peer, ..good.clone() },
        ] {
            assert!(matches!(judge(&party, &away, None), Verdict::Away(_)), "{away:?}");
        }
    }
}
