//! A process that is killed at random points. This proves crashes of a process, not of a machine: the
//! kernel keeps what was written.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use terrane_store::disk::{Catalog, CatalogOptions, Directory, Files};
use terrane_testkit::random::Seeded;

use super::harness::{Key, Note, Step, Store, check, create_slab, expected, groups, namespace};
use super::recorder::{Change, History, Image};

const DIRECTORY: &str = "TERRANE_STORE_KILLED_IN";
const NOTES: &str = "TERRANE_STORE_KILLED_NOTES";
const TEST: &str = "disk::killed::a_killed_process_leaves_what_was_durable";

/// The processes that are killed. Raise it for a longer search.
#[expect(clippy::disallowed_methods, reason = "a longer search is asked for")]
fn kills() -> u64 {
    std::env::var("TERRANE_STORE_KILLS").map_or(100, |count| count.parse().expect("a number"))
}

#[test]
fn a_killed_process_leaves_what_was_durable() {
    #[expect(clippy::disallowed_methods, reason = "the child is told where to write")]
    if let (Some(directory), Ok(notes)) = (std::env::var_os(DIRECTORY), std::env::var(NOTES)) {
        write_until_killed(Path::new(&directory), notes.parse().unwrap());
    }
    let directory = tempfile::tempdir().unwrap();
    let files = Directory::open(directory.path(), "model").unwrap();
    let (groups, options) = (groups(), CatalogOptions::default());
    drop(Catalog::open(directory.path(), &namespace(), &groups, options).unwrap());
    create_slab(&files);
    let mut history: History<Note> = History { base: Image::default(), log: Vec::new() };
    let mut random = Seeded::new(23);
    let least = usize::try_from(2 * kills()).unwrap();
    let mut killed = 0;
    // If syncs are slow, more processes are killed, and later, until there are enough notes.
    while killed < kills() || (history.log.len() <= least && killed < 5 * kills()) {
        let (kill, longest) = (killed, 8000 * (1 + killed / kills()));
        killed += 1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
            .env(DIRECTORY, directory.path())
            .env(NOTES, history.log.len().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let open = lines.by_ref().map(Result::unwrap).find(|line| line.contains("opened"));
        assert!(open.is_some(), "the child does not open the store");
        let longest = usize::try_from(longest).unwrap();
        thread::sleep(Duration::from_micros(random.below(longest).try_into().unwrap()));
        child.kill().unwrap();
        child.wait().unwrap();
        // A line that was cut short says nothing.
        let notes = lines.map_while(Result::ok).filter_map(|line| decode(&line));
        history.log.extend(notes.map(Change::Note));
        // The last step may have been cut short.
        let last = match history.log.last() {
            Some(Change::Note(Note::Puts(key, _))) => Some(vec![*key]),
            Some(Change::Note(Note::Removes(keys))) => Some(keys.clone()),
            _ => None,
        };
        history.log.extend(last.map(|keys| Change::Note(Note::Failed(keys))));
        let now = expected(&history, history.log.len());
        let checked = check(&image(directory.path()), &now).map(|_| ());
        assert_eq!(checked, Ok(()), "kill {kill}, {} notes", history.log.len());
    }
    println!("{} notes after {killed} kills", history.log.len());
    assert!(history.log.len() > least, "{} notes after {killed} kills", history.log.len());
}

fn write_until_killed(directory: &Path, notes: usize) -> ! {
    // Not for long, should the parent be killed itself.
    // SAFETY: the call takes plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let files: Arc<dyn Files> = Arc::new(Directory::open(directory, "model").unwrap());
    let mut out = std::io::stdout();
    let sink = Box::new(move |note: Note| {
        out.write_all(encode(&note).as_bytes()).unwrap();
        out.flush().unwrap();
    });
    let mut store = Store::open_in(files, notes, sink).unwrap();
    println!("\nopened");
    let mut random = Seeded::new(u64::try_from(notes).unwrap());
    loop {
        let key = Key::try_from(random.below(40)).unwrap();
        let step = match random.below(24) {
            0..=11 => Step::Put(key, u32::try_from(random.below(15)).unwrap()),
            12..=15 => Step::Remove(vec![key]),
            16..=21 => Step::Sync,
            22 => Step::Checkpoint(vec![Step::Remove(vec![key]), Step::Sync]),
            _ => Step::Clear,
        };
        store.step(&step).unwrap();
    }
}

/// A note as a line, with an end that shows that it is whole.
fn encode(note: &Note) -> String {
    match note {
        Note::Puts(key, slot) => format!("put {key} {slot} .\n"),
        Note::Removes(keys) => format!("remove {} .\n", keys[0]),
        Note::Synced(notes) => format!("synced {notes} .\n"),
        Note::Clears => "clears .\n".into(),
        Note::Cleared => "cleared .\n".into(),
        Note::Failed(keys) => format!("failed {} .\n", keys[0]),
    }
}

fn decode(line: &str) -> Option<Note> {
    let words: Vec<&str> = line.strip_suffix(" .")?.split(' ').collect();
    let number = |at: usize| words[at].parse().unwrap();
    Some(match words[0] {
        "put" => Note::Puts(number(1), number(2)),
        "remove" => Note::Removes(vec![number(1)]),
        "synced" => Note::Synced(words[1].parse().unwrap()),
        "clears" => Note::Clears,
        "cleared" => Note::Cleared,
        other => panic!("{other}"),
    })
}

/// The files as they are.
fn image(directory: &Path) -> Image {
    let mut image = Image::default();
    for entry in std::fs::read_dir(directory.join("model")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        image.insert(&name, std::fs::read(entry.path()).unwrap());
    }
    image
}
