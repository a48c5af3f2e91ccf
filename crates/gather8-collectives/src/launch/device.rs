//! Which device a rank uses.

use super::{Launch, launch_error};
use crate::error::Result;

impl Launch {
    /// Which of the `visible` devices this rank uses: the only one, else the one of its local rank.
    /// With `share`, ranks beyond the last device start again from the first.
    ///
    /// # Errors
    /// [`Error::Launch`](crate::Error::Launch) if no device is visible, if there is none for this
    /// rank, or if there are several and the launcher has not said which local rank this is.
    pub fn device(&self, visible: u32, share: bool) -> Result<u32> {
        match (visible, self.local_rank) {
            (0, _) => Err(launch_error("no device is visible".to_owned())),
            (1, _) => Ok(0),
            (_, Some(local)) if local < visible => Ok(local),
            (_, Some(local)) if share => Ok(local % visible),
            (_, Some(local)) => Err(launch_error(format!(
                "local rank {local} has no device among {visible}: start fewer ranks per host, or let them share"
            ))),
            (_, None) => Err(launch_error(format!(
                "{visible} devices are visible and {} give no local rank: set GATHER8_LOCAL_RANK, or make one device visible to each rank",
                self.family
            ))),
        }
    }
}
