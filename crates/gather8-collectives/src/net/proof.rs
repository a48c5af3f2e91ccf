//! Proofs that a peer knows the job's token, without sending it.

use blake3::Hash;

use crate::error::{Error, Result};

/// Bytes of a token that a rank makes up.
pub(crate) const TOKEN: usize = 32;
/// The shortest token that a user may give.
pub(crate) const SHORTEST_TOKEN: usize = 16;
/// The longest.
pub(crate) const LONGEST_TOKEN: usize = 1024;

/// A number used once.
pub(crate) type Nonce = [u8; 32];

/// A fresh nonce.
pub(crate) fn nonce() -> Result<Nonce> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| Error::Rendezvous {
        problem: format!("the system gives no random numbers ({error})"),
    })?;
    Ok(bytes)
}

/// The key that a job's ranks share; derived from the token, and for the connections among the
/// ranks from the session that rank 0 has opened.
#[derive(Clone)]
pub(crate) struct Key([u8; 32]);

impl Key {
    pub(crate) fn of_token(token: &[u8]) -> Self {
        Self(blake3::derive_key("gather8 2026-11 rendezvous token", token))
    }

    /// The key of one session.
    pub(crate) fn session(&self, nonce: &Nonce) -> Self {
        Self(*blake3::keyed_hash(&self.0, nonce).as_bytes())
    }

    /// Who proves what to whom, bound to both sides' nonces.
    pub(crate) fn prove(&self, side: Side, said: &[u8], theirs: &Nonce) -> Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(match side {
            Side::Caller => b"gather8 caller",
            Side::Callee => b"gather8 callee",
        });
        hasher.update(&(said.len() as u64).to_le_bytes());
        hasher.update(said);
        hasher.update(theirs);
        hasher.finalize()
    }

    /// Compares in constant time.
    pub(crate) fn holds(&self, side: Side, said: &[u8], theirs: &Nonce, proof: [u8; 32]) -> bool {
        // The comparison of `Hash` takes the same time whatever differs.
        self.prove(side, said, theirs) == Hash::from_bytes(proof)
    }
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Has opened it.
    Caller,
    /// Has accepted it.
    Callee,
}
