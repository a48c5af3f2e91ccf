//! The first bytes of every connection: fixed in size, so that a stranger can make nobody wait for,
//! or store, more than these.
//!
//! ```text
//! caller: greeting (version, ranks, world, job, process, nonce)
//! callee: challenge (version, nonce)
//! caller: proof over the greeting and the callee's nonce
//! callee: verdict (welcome and its own proof, or the reason)
//! ```
//! A callee answers a wrong proof by closing. Both proofs cover the whole greeting, and with it
//! everything that the caller claims; so a caller that knows the token is recognised whatever its
//! claims, and can be told why they do not fit. For the same reason these bytes stay as they are from
//! version 2 on, whatever later versions send after them.

use std::fmt;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::error::Result;
use crate::net::proof::{Key, Nonce, Side, nonce};

/// Changes whenever bytes on a connection do.
pub(crate) const PROTOCOL: u16 = 2;
/// How long a connection may take to prove itself.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3);

const MAGIC: &[u8; 8] = b"GATHER8\n";
const GREETING: usize = 8 + 2 + 1 + 4 + 4 + 4 + 32 + 32 + 2 + 16 + 4 + HOST + 8;
const CHALLENGE: usize = 8 + 2 + 32;
/// The longest reason; longer ones are cut.
const REASON: usize = 400;
/// Bytes of a host's name; longer names are cut.
const HOST: usize = 32;

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
    pub(crate) version: u16,
    pub(crate) purpose: Purpose,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) world: u32,
    pub(crate) job: [u8; 32],
    /// Where the caller itself listens.
    pub(crate) port: u16,
    /// The crate's version, padded with zeros.
    pub(crate) build: [u8; 16],
    pub(crate) process: Process,
}

/// Which process calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) number: u32,
    /// Its host's name, padded with zeros.
    pub(crate) host: [u8; HOST],
    /// A random number: the same in every attempt of one rank, and in nobody else's.
    pub(crate) attempt: [u8; 8],
}

impl Process {
    /// This one.
    pub(crate) fn own() -> Result<Self> {
        let nonce = nonce()?;
        Ok(Self {
            number: std::process::id(),
            host: padded(host_name().bytes()),
            attempt: nonce.first_chunk().copied().unwrap_or_default(),
        })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.number, readable(&self.host))
    }
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

fn padded<const N: usize>(bytes: impl Iterator<Item = u8>) -> [u8; N] {
    let mut padded = [0; N];
    padded.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    padded
}

/// This build's version.
pub(crate) fn build() -> [u8; 16] {
    padded(env!("CARGO_PKG_VERSION").bytes())
}

/// A padded text, fit for an error message.
pub(crate) fn readable(padded: &[u8]) -> String {
    let text = padded.iter().take_while(|byte| **byte != 0).map(|&byte| char::from(byte));
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
        bytes.extend(self.version.to_le_bytes());
        bytes.push(self.purpose as u8);
        bytes.extend(self.from.to_le_bytes());
        bytes.extend(self.to.to_le_bytes());
        bytes.extend(self.world.to_le_bytes());
        bytes.extend(self.job);
        bytes.extend(nonce);
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(self.build);
        bytes.extend(self.process.number.to_le_bytes());
        bytes.extend(self.process.host);
        bytes.extend(self.process.attempt);
        bytes
    }

    /// The greeting; `None` for what no version sends.
    fn decode(bytes: &[u8; GREETING]) -> Option<Self> {
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
        let number = u32::from_le_bytes(take(&mut rest)?);
        let process = Process { number, host: take(&mut rest)?, attempt: take(&mut rest)? };
        Some(Self { version, purpose, from, to, world, job, port, build, process })
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
        let other_version = || version_text(greeting.from, greeting.version, greeting.to, version);
        let closed = |_| {
            if version == greeting.version {
                Failed::Unfit(format!(
                    "rank {} did not accept this rank's proof (another token?)",
                    greeting.to
                ))
            } else {
                Failed::Unfit(other_version())
            }
        };
        let proof = key.prove(Side::Caller, &said, &theirs);
        stream.write_all(proof.as_bytes()).await.map_err(closed)?;
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
            return if version == greeting.version {
                Ok(())
            } else {
                Err(Failed::Refused(other_version()))
            };
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
        let greeting = Greeting::decode(&said)?;
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
        answer.extend(padded::<REASON>(reason.bytes()));
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

/// What ranks of two versions are told.
pub(crate) fn version_text(from: u32, theirs: u16, to: u32, ours: u16) -> String {
    format!(
        "rank {from} speaks version {theirs} of the protocol, rank {to} version {ours}: run the same build everywhere"
    )
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
            version: PROTOCOL,
            purpose: Purpose::Rendezvous,
            from: 3,
            to: 0,
            world: 4,
            job: [7; 32],
            port: 4000,
            build: build(),
            process: Process { number: 81, host: padded("vm".bytes()), attempt: [3; 8] },
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
    fn another_version_is_recognised_and_named() {
        let key = Key::of_token(b"a token of some length");
        let (ours, theirs) = (proof::nonce().unwrap(), proof::nonce().unwrap());
        let newer = Greeting { version: PROTOCOL + 1, ..greeting() };
        on_runtime(async {
            // Whoever accepts sees the version, proved.
            let (mut here, there) = tokio::io::duplex(4096);
            let (called, accepted) = tokio::join!(call(&mut here, &newer, &key, &ours), async {
                let caller = accept(there, &key, &theirs).await.unwrap();
                let accepted = caller.greeting.clone();
                caller.refuse("because").await;
                accepted
            });
            assert_eq!((called, accepted), (Err(Failed::Refused("because".to_owned())), newer));

            // Whoever calls one that just closes names it too.
            let (mut here, mut there) = tokio::io::duplex(4096);
            let closes = async {
                let mut challenge = MAGIC.to_vec();
                challenge.extend(9_u16.to_le_bytes());
                challenge.extend([9; 32]);
                there.write_all(&challenge).await.unwrap();
                there.read_exact(&mut [0; GREETING]).await.unwrap();
                drop(there);
            };
            let greeting = greeting();
            let (called, ()) = tokio::join!(call(&mut here, &greeting, &key, &ours), closes);
            let expected = "rank 3 speaks version 2 of the protocol, rank 0 version 9: run the same build everywhere";
            assert_eq!(called, Err(Failed::Unfit(expected.to_owned())));
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
