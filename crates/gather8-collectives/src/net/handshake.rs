//! The first bytes of every connection: fixed in size, so that a stranger can make nobody wait for,
//! or store, more than these.
//!
//! ```text
//! caller: greeting (rank, world, job, version, nonce)
//! callee: challenge (version, nonce)
//! caller: proof over the greeting and the callee's nonce
//! callee: verdict (welcome and its own proof, or the reason)
//! ```
//! A callee answers a wrong proof by closing. Both proofs cover the whole greeting, and with it the
//! purpose, both ranks, the world, the job and the protocol's version.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::net::proof::{Key, Nonce, Side};

/// Changes whenever bytes on a connection do.
pub(crate) const PROTOCOL: u16 = 1;
/// How long a connection may take to prove itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

const MAGIC: &[u8; 8] = b"GATHER8\n";
const GREETING: usize = 8 + 2 + 1 + 4 + 4 + 4 + 32 + 32 + 2 + 16;
const CHALLENGE: usize = 8 + 2 + 32;
const REASON: usize = 200;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Purpose {
    /// A rank comes to the rendezvous.
    Rendezvous = 1,
    /// A rank comes to another, after the rendezvous.
    Peer = 2,
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) purpose: Purpose,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) world: u32,
    pub(crate) job: [u8; 32],
    /// Where the caller itself listens.
    pub(crate) port: u16,
    /// The crate's version, padded with zeros.
    pub(crate) build: [u8; 16],
}

/// This build's version.
pub(crate) fn build() -> [u8; 16] {
    let mut build = [0; 16];
    for (to, from) in build.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from;
    }
    build
}

/// A version for an error text.
pub(crate) fn build_name(build: &[u8; 16]) -> String {
    let text = build.iter().take_while(|byte| **byte != 0).map(|&byte| char::from(byte));
    text.map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect()
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The other end is silent, gone, or speaks something else; or the tokens differ.
    Unfit(String),
    /// The other end knows the token and says no.
    Refused(String),
}

impl Greeting {
    fn encode(&self, nonce: &Nonce) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(GREETING);
        bytes.extend(MAGIC);
        bytes.extend(PROTOCOL.to_le_bytes());
        bytes.push(self.purpose as u8);
        bytes.extend(self.from.to_le_bytes());
        bytes.extend(self.to.to_le_bytes());
        bytes.extend(self.world.to_le_bytes());
        bytes.extend(self.job);
        bytes.extend(nonce);
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(self.build);
        bytes
    }

    /// The greeting and the caller's nonce; `None` for what this version does not send.
    fn decode(bytes: &[u8; GREETING]) -> Option<(Self, u16)> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let version = u16::from_le_bytes(take(&mut rest)?);
        let purpose = match take::<1>(&mut rest)? {
            [1] => Purpose::Rendezvous,
            [2] => Purpose::Peer,
            _ => return None,
        };
        let from = u32::from_le_bytes(take(&mut rest)?);
        let to = u32::from_le_bytes(take(&mut rest)?);
        let world = u32::from_le_bytes(take(&mut rest)?);
        let job = take(&mut rest)?;
        let _nonce: Nonce = take(&mut rest)?;
        let port = u16::from_le_bytes(take(&mut rest)?);
        let build = take(&mut rest)?;
        Some((Self { purpose, from, to, world, job, port, build }, version))
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*head)
}

/// Calls: proves this side's knowledge and asks for the other's.
pub(crate) async fn call<S>(
    stream: &mut S,
    greeting: &Greeting,
    key: &Key,
    nonce: &Nonce,
) -> Result<(), Failed>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let talk = async {
        let said = greeting.encode(nonce);
        stream.write_all(&said).await.map_err(io)?;
        let mut challenge = [0; CHALLENGE];
        stream.read_exact(&mut challenge).await.map_err(io)?;
        let (version, theirs) = read_challenge(&challenge)
            .ok_or_else(|| Failed::Unfit("something else than gather8 answered".to_owned()))?;
        if version != PROTOCOL {
            return Err(Failed::Refused(format!(
                "rank {} speaks version {version} of the protocol, rank {} version {PROTOCOL}: run the same build everywhere",
                greeting.to, greeting.from
            )));
        }
        let proof = key.prove(Side::Caller, &said, &theirs);
        stream.write_all(proof.as_bytes()).await.map_err(io)?;
        let closed = |_| {
            Failed::Unfit(format!(
                "rank {} did not accept this rank's proof (another token?)",
                greeting.to
            ))
        };
        let mut answer = [0; 33];
        stream.read_exact(&mut answer).await.map_err(closed)?;
        let [verdict, proof @ ..] = answer;
        if !key.holds(Side::Callee, &said, &theirs, proof) {
            return Err(Failed::Unfit(format!(
                "who answered as rank {} does not know the token",
                greeting.to
            )));
        }
        if verdict == 0 {
            return Ok(());
        }
        let mut reason = [0; REASON];
        stream.read_exact(&mut reason).await.map_err(io)?;
        Err(Failed::Refused(reason_text(&reason)))
    };
    timeout(PATIENCE, talk).await.unwrap_or_else(|_| Err(Failed::Unfit("no answer".to_owned())))
}

/// A caller that has proved itself and waits for the verdict.
pub(crate) struct Caller<S> {
    pub(crate) stream: S,
    pub(crate) greeting: Greeting,
    proof: [u8; 32],
}

/// Accepts: `None` for everybody who does not know the token or is not in time.
pub(crate) async fn accept<S>(mut stream: S, key: &Key, nonce: &Nonce) -> Option<Caller<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let talk = async {
        let mut said = [0; GREETING];
        // The first bytes decide: whoever says something else is not listened to any longer.
        let (magic, rest) = said.split_at_mut(MAGIC.len());
        stream.read_exact(magic).await.ok()?;
        if magic != MAGIC {
            return None;
        }
        stream.read_exact(rest).await.ok()?;
        let mut challenge = MAGIC.to_vec();
        challenge.extend(PROTOCOL.to_le_bytes());
        challenge.extend(nonce);
        stream.write_all(&challenge).await.ok()?;
        let (greeting, version) = Greeting::decode(&said)?;
        if version != PROTOCOL {
            return None;
        }
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).await.ok()?;
        if !key.holds(Side::Caller, &said, nonce, proof) {
            return None;
        }
        let proof = *key.prove(Side::Callee, &said, nonce).as_bytes();
        Some((greeting, proof))
    };
    let (greeting, proof) = timeout(PATIENCE, talk).await.ok()??;
    Some(Caller { stream, greeting, proof })
}

impl<S: AsyncRead + AsyncWrite + Unpin> Caller<S> {
    /// Lets the caller in.
    pub(crate) async fn welcome(mut self) -> Option<S> {
        let mut answer = vec![0];
        answer.extend(self.proof);
        timeout(PATIENCE, self.stream.write_all(&answer)).await.ok()?.ok()?;
        Some(self.stream)
    }

    /// Sends the caller away, with a reason.
    pub(crate) async fn refuse(mut self, reason: &str) {
        let mut answer = vec![1];
        answer.extend(self.proof);
        let mut text = reason.as_bytes().iter().copied().take(REASON).collect::<Vec<_>>();
        text.resize(REASON, 0);
        answer.extend(text);
        // A caller that is gone needs no reason.
        let _ = timeout(PATIENCE, self.stream.write_all(&answer)).await;
        let _ = timeout(PATIENCE, self.stream.shutdown()).await;
    }
}

fn read_challenge(bytes: &[u8; CHALLENGE]) -> Option<(u16, Nonce)> {
    let mut rest = bytes.strip_prefix(MAGIC)?;
    let version = u16::from_le_bytes(take(&mut rest)?);
    Some((version, take(&mut rest)?))
}

fn reason_text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn io(error: std::io::Error) -> Failed {
    Failed::Unfit(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::proof;

    fn greeting() -> Greeting {
        Greeting {
            purpose: Purpose::Rendezvous,
            from: 3,
            to: 0,
            world: 4,
            job: [7; 32],
            port: 4000,
            build: build(),
        }
    }

    fn on_runtime<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    async fn talk(
        caller: &Key,
        callee: &Key,
        refuse: Option<&str>,
    ) -> (Result<(), Failed>, Option<Greeting>) {
        let (mut here, there) = tokio::io::duplex(4096);
        let (ours, theirs) = (proof::nonce().unwrap(), proof::nonce().unwrap());
        let answer = async {
            let caller = accept(there, callee, &theirs).await?;
            let greeting = caller.greeting.clone();
            match refuse {
                Some(reason) => caller.refuse(reason).await,
                None => drop(caller.welcome().await),
            }
            Some(greeting)
        };
        let greeting = greeting();
        tokio::join!(call(&mut here, &greeting, caller, &ours), answer)
    }

    #[test]
    fn equal_tokens_meet_and_others_do_not() {
        on_runtime(async {
            let (key, other) =
                (Key::of_token(b"a token of some length"), Key::of_token(b"another"));
            let (called, answered) = talk(&key, &key, None).await;
            assert_eq!((called, answered), (Ok(()), Some(greeting())));
            let (called, answered) = talk(&other, &key, None).await;
            assert!(matches!(called, Err(Failed::Unfit(text)) if text.contains("another token")));
            assert_eq!(answered, None);
            let (called, _) = talk(&key, &key, Some("rank 3 is already here")).await;
            assert_eq!(called, Err(Failed::Refused("rank 3 is already here".to_owned())));
        });
    }

    #[test]
    fn an_impostor_that_lets_everybody_in_is_noticed() {
        on_runtime(async {
            let (mut here, mut there) = tokio::io::duplex(4096);
            let impostor = async {
                let mut said = [0; GREETING];
                there.read_exact(&mut said).await.unwrap();
                let mut challenge = MAGIC.to_vec();
                challenge.extend(PROTOCOL.to_le_bytes());
                challenge.extend([9; 32]);
                there.write_all(&challenge).await.unwrap();
                there.write_all(&[0; 33]).await.unwrap();
                there
            };
            let key = Key::of_token(b"a token of some length");
            let greeting = greeting();
            let (called, _there) =
                tokio::join!(call(&mut here, &greeting, &key, &[1; 32]), impostor);
            assert!(
                matches!(called, Err(Failed::Unfit(text)) if text.contains("does not know the token"))
            );
        });
    }

    #[test]
    fn another_version_is_named() {
        on_runtime(async {
            let (mut here, mut there) = tokio::io::duplex(4096);
            let other = async {
                let mut challenge = MAGIC.to_vec();
                challenge.extend(9_u16.to_le_bytes());
                challenge.extend([9; 32]);
                there.write_all(&challenge).await.unwrap();
                there
            };
            let key = Key::of_token(b"a token of some length");
            let greeting = greeting();
            let (called, _there) = tokio::join!(call(&mut here, &greeting, &key, &[1; 32]), other);
            assert!(
                matches!(called, Err(Failed::Refused(text)) if text.starts_with("rank 0 speaks version 9"))
            );
        });
    }

    #[test]
    fn every_bit_of_a_greeting_is_proved() {
        // Whoever changes a bit on the way is not let in.
        let key = Key::of_token(b"a token of some length");
        let said = greeting().encode(&[5; 32]);
        let proof = *key.prove(Side::Caller, &said, &[6; 32]).as_bytes();
        assert!(key.holds(Side::Caller, &said, &[6; 32], proof));
        assert!(!key.holds(Side::Callee, &said, &[6; 32], proof));
        assert!(!key.holds(Side::Caller, &said, &[7; 32], proof));
        for bit in 0..8 * said.len() {
            let mut changed = said.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.holds(Side::Caller, &changed, &[6; 32], proof));
        }
    }
}
