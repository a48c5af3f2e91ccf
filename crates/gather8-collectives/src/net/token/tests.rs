use super::*;
use std::os::unix::fs::{PermissionsExt, symlink};

fn invitation() -> Invitation {
    Invitation {
        address: "127.0.0.1:4000".parse().unwrap(),
        token: std::array::from_fn(|i| i as u8 * 7),
        process: std::process::id(),
    }
}

/// A private directory, and a path in it.
fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = path(Some(&directory.path().join("g8")), "job/../x 1", Some(80)).unwrap();
    (directory, path)
}

/// A file with this text and mode, which nobody has locked.
fn leave(path: &Path, text: &[u8], mode: u32) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn what_is_published_is_read_and_private() {
    let (_directory, path) = place();
    assert_eq!(read(&path).unwrap(), Found::Nothing);
    let published = publish(&path, "job", &invitation()).unwrap();
    assert_eq!(read(&path).unwrap(), Found::Living(invitation()));
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("jobx1-") && name.ends_with("-80.rendezvous"), "{name}");
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
    drop(published);
    assert_eq!(read(&path).unwrap(), Found::Nothing);
}

#[test]
fn a_dead_job_gives_way_and_a_live_one_does_not() {
    let (_directory, path) = place();
    let published = publish(&path, "job", &invitation()).unwrap();
    let text = fs::read(&path).unwrap();
    let error = publish(&path, "job", &invitation()).unwrap_err().to_string();
    let expected =
        format!("process {} is rank 0 of a job `job` that is starting", std::process::id());
    assert!(error.contains(&expected) && error.contains("GATHER8_JOB"), "{error}");
    drop(published);
    // Left behind by a process whose number lives, even as this one's own.
    leave(&path, &text, 0o600);
    assert_eq!(read(&path).unwrap(), Found::Dead);
    let published = publish(&path, "job", &invitation()).unwrap();
    assert_eq!(read(&path).unwrap(), Found::Living(invitation()));
    // Whoever has removed it by hand, and put another there: that one stays.
    fs::remove_file(&path).unwrap();
    leave(&path, &text, 0o600);
    drop(published);
    assert_eq!(read(&path).unwrap(), Found::Dead);
}

#[test]
fn what_the_killed_have_left_is_swept() {
    let (_directory, path) = place();
    let folder = path.parent().unwrap();
    for name in ["a-1-0.rendezvous", "b-2-0.77.draft", "notes.txt"] {
        leave(&folder.join(name), b"gather8 1", 0o600);
    }
    let other = publish(&folder.join("other-0.rendezvous"), "other", &invitation()).unwrap();
    let published = publish(&path, "job", &invitation()).unwrap();
    assert_eq!(fs::read_dir(folder).unwrap().count(), 3);
    drop((other, published));
    assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "what is not ours stays");
}

#[test]
fn of_many_that_replace_a_dead_one_one_succeeds() {
    let (_directory, path) = place();
    for round in 0..20 {
        leave(&path, b"gather8 0", 0o600);
        let start = std::sync::Barrier::new(8);
        let published = std::thread::scope(|scope| {
            let publishers = (0..8).map(|_| {
                scope.spawn(|| {
                    start.wait();
                    publish(&path, "job", &invitation())
                })
            });
            let publishers = publishers.collect::<Vec<_>>();
            publishers.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(published.iter().flatten().count(), 1, "round {round}: {published:?}");
        assert_eq!(read(&path).unwrap(), Found::Living(invitation()));
    }
}

#[test]
fn a_strangers_file_is_refused() {
    let (directory, path) = place();
    let publish = |path: &Path| publish(path, "job", &invitation());
    // A link, even to a good file.
    let elsewhere = directory.path().join("elsewhere");
    let published = publish(&elsewhere).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("is not what rank 0 writes"));
    assert!(publish(&path).is_err());
    fs::remove_file(&path).unwrap();
    drop(published);
    // A file that others can write.
    let _published = publish(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains("can be reached by others (mode 666)"), "{error}");
    assert!(publish(&path).is_err());
    fs::remove_file(&path).unwrap();
    // Another user's, where this test may make one.
    let _published = publish(&path).unwrap();
    if std::os::unix::fs::chown(&path, Some(12345), None).is_ok() {
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("belongs to user 12345"), "{error}");
    }
    fs::remove_file(&path).unwrap();
    // Nothing that would block, and nothing huge.
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("is no ordinary file"));
    fs::remove_file(&path).unwrap();
    leave(&path, &[b'x'; 1000], 0o600);
    assert!(read(&path).unwrap_err().to_string().contains("longer than 512 bytes"));
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let open = directory.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    let error = path(Some(&open), "job", None).unwrap_err().to_string();
    assert!(error.contains("lets other users in (mode 755)"), "{error}");
    let link = directory.path().join("link");
    symlink(&open, &link).unwrap();
    assert!(path(Some(&link), "job", None).unwrap_err().to_string().contains("is no directory"));
}

#[test]
fn half_a_file_is_no_invitation() {
    let (_directory, path) = place();
    let _published = publish(&path, "job", &invitation()).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    for end in 0..text.len() - 1 {
        assert_eq!(parse(&text[..end]), None, "cut at {end}");
    }
    assert!(parse(&text.replace("gather8 1", "gather8 2")).is_none());
}
