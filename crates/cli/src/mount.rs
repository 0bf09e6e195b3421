//! `rampool mount`: a directory whose files lie in the pool.

mod buffers;
mod kernel_files;
mod mover;
mod region_files;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use fuser::{Filesystem, MountOption, Session, SessionACL};
use rampool_client::direct::Direct;
use rampool_client::pool::{LeaseRequest, Pool, PoolConfig};
use rampool_files::{Files, Owner};
use rampool_kernel::words::say_line;
use rampool_net::transport::SameHost;
use rampool_paging::placement::ServerIndex;
use rampool_wire::units::{ByteLen, Extent, PageIndex};
use rustix::mount::UnmountFlags;

use self::buffers::Buffers;
use self::kernel_files::KernelFiles;
use self::mover::Mover;
use self::region_files::{RegionFiles, Regions};
use crate::end_signals::EndSignals;
use crate::run::PoolOptions;
use crate::run::private::PrivateServer;
use crate::rundir::RunDir;

/// Mount a directory for scratch files that lie on memory servers
///
/// Any program can use it: one that spills to files, a static or a Go program, a whole build. The files are
/// gone when this command ends, by SIGTERM, SIGINT or `umount`. Needs /dev/fuse, and root or fusermount3.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["size", "regions"])))]
pub struct Args {
    /// An empty directory
    directory: PathBuf,

    /// Memory, in bytes, to lease for files
    #[arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true)]
    size: ByteLen,

    /// Show the named regions of a lease that programs have, for reading, instead of scratch files: a file
    /// with the lease's ticket
    #[arg(long, value_name = "FILE")]
    regions: Option<PathBuf>,

    #[command(flatten)]
    of_pool: PoolOptions,

    /// Let other users of this machine in, as far as the files' permissions allow [default: only this user]
    #[arg(long)]
    allow_other: bool,
}

/// How soon it is noticed that somebody else has unmounted the directory.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long the end of a session may take once nothing is mounted.
const END_DEADLINE: Duration = Duration::from_secs(5);
/// What the kernel reads ahead in a file, in KiB, and the percentage of the machine's dirty memory that may
/// be in files here. Its own are 128 and 1.
const READ_AHEAD_KIB: &str = "4096";
const DIRTY_PERCENT: &str = "50";

pub fn run(args: &Args) -> Result<i32> {
    let signals = EndSignals::block()?;
    // The servers are not troubled for a directory that cannot be used.
    let directory = empty_directory(&args.directory)?;
    if let Some(ticket) = &args.regions {
        return args.serve_regions(&directory, ticket, &signals).map(|()| 0);
    }
    write_under_pressure();
    let run_dir = RunDir::create().context("cannot create the mount's directory")?;
    let (config, _private) = args.pool_config(&run_dir)?;
    let mut pool = Pool::connect(&config)?;
    let pages = usable_pages(&pool, args.size.pages(), config.stripe_pages);
    let region = match pool.create_region() {
        Ok(region) => region,
        Err(error) => {
            pool.close();
            return Err(error.into());
        }
    };
    say_what_survives(&pool);
    let buffers = Arc::new(Buffers::default());
    let (mover, jobs) = Mover::new(pool, region, Arc::clone(&buffers))?;
    let mover = std::thread::Builder::new().name("mover".to_owned()).spawn(move || mover.run())?;
    let (ends, ended) = mpsc::channel();
    let files = Files::new(pages, args.owner(), SystemTime::now());
    let said = ByteLen::from_pages(files.totals().pages).to_string();
    let files = KernelFiles::new(files, jobs.clone(), buffers, ends);
    let mounted = args.serve(&directory, files, &said, || signals.wait(LOOK_EVERY).is_some(), &ended);
    jobs.stop();
    if mover.join().is_err() {
        bail!("the thread that moves pages has ended early; this is a defect of rampool");
    }
    mounted.map(|()| 0)
}

impl Args {
    fn pool_config(&self, run_dir: &RunDir) -> Result<(PoolConfig, Option<PrivateServer>)> {
        self.of_pool.check()?;
        let mut servers = self.of_pool.servers.clone();
        let mut private = None;
        if servers.is_empty() {
            let server =
                private.insert(PrivateServer::in_memory(run_dir.path(), Some(self.size), self.size)?);
            server.wait_until_ready(run_dir.path())?;
            servers.push(server.spec.clone());
            say_line("rampool: no --server given: files go to a private server on this machine, compressed");
        }
        let mut config = self.of_pool.config(servers, self.size, "mount")?;
        if config.same_host == Some(SameHost::Auto) {
            config.same_host = Some(SameHost::LongRings);
        }
        Ok((config, private))
    }

    /// Who has the directory.
    fn owner(&self) -> Owner {
        let (user, group) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Owner { user, group, permissions: if self.allow_other { 0o1777 } else { 0o755 } }
    }

    fn serve_regions(&self, directory: &Path, ticket: &Path, signals: &EndSignals) -> Result<()> {
        let text = std::fs::read_to_string(ticket)
            .with_context(|| format!("cannot read the ticket in {}", ticket.display()))?;
        let ticket =
            text.parse().with_context(|| format!("{} has no ticket of a lease", ticket.display()))?;
        let mut config = self.of_pool.config(Vec::new(), ByteLen(0), "mount")?;
        config.lease = LeaseRequest::Attach { ticket, name: "mount".to_owned() };
        let regions = Arc::new(Mutex::new(Regions::new(Direct::connect(&config)?)));
        let lock = || regions.lock().unwrap_or_else(PoisonError::into_inner);
        let (ends, ended) = mpsc::channel();
        let files = RegionFiles::new(Arc::clone(&regions), self.owner(), ends);
        let is_over = || {
            lock().progress();
            signals.wait(LOOK_EVERY).is_some()
        };
        let mounted = self.serve(directory, files, "named regions", is_over, &ended);
        lock().close();
        mounted
    }

    /// Mounts, waits until it is over or somebody else unmounts, and unmounts.
    fn serve(
        &self,
        directory: &Path,
        files: impl Filesystem,
        said: &str,
        is_over: impl Fn() -> bool,
        ended: &Receiver<()>,
    ) -> Result<()> {
        let mut options = fuser::Config::default();
        options.mount_options = vec![
            MountOption::FSName("rampool".to_owned()),
            MountOption::Subtype("rampool".to_owned()),
            MountOption::DefaultPermissions,
            MountOption::NoDev,
            MountOption::NoSuid,
        ];
        options.mount_options.extend(self.regions.is_some().then_some(MountOption::RO));
        options.acl = if self.allow_other { SessionACL::All } else { SessionACL::Owner };
        let session =
            Session::new(files, directory, &options).and_then(Session::spawn).with_context(|| {
                format!(
                    "cannot mount on {}: this needs /dev/fuse (modprobe fuse), and root or fusermount3",
                    directory.display()
                )
            })?;
        tune(directory);
        // On standard output for scripts, as `rampool serve` does.
        println!("files on {}: {said}", directory.display());
        loop {
            if is_over() {
                break;
            }
            if ended.try_recv().is_ok() {
                return Ok(());
            }
        }
        // Meanwhile the session serves what the kernel writes back, and what servers do not answer fails.
        match rustix::mount::unmount(directory, UnmountFlags::empty()) {
            Err(rustix::io::Errno::BUSY) => {
                say_line(&format!(
                    "rampool: {} is in use: programs that have files open there get errors from now on",
                    directory.display()
                ));
                // The connection to the kernel ends with this process.
                _ = rustix::mount::unmount(directory, UnmountFlags::DETACH);
                std::mem::forget(session);
                return Ok(());
            }
            // Not root: fusermount3 does it.
            _ => drop(session),
        }
        _ = ended.recv_timeout(END_DEADLINE);
        Ok(())
    }
}

fn empty_directory(path: &Path) -> Result<PathBuf> {
    let named = || format!("cannot mount on {}", path.display());
    if std::fs::read_dir(path).with_context(named)?.next().is_some() {
        bail!("{} is not empty: name an empty directory", path.display());
    }
    path.canonicalize().with_context(named)
}

/// The pages of the region that the leases have room for: placement gives servers whole stripes.
fn usable_pages(pool: &Pool, wanted: u64, stripe_pages: u32) -> Vec<Extent> {
    /// Stripes that do not fit are passed over; where most of them are, the servers are as good as full.
    const PASSED_OVER: u64 = 1 << 16;
    let mut room: Vec<u64> = (0..pool.servers().count())
        .map(|server| pool.leased(ServerIndex(u16::try_from(server).expect("at most 4096"))))
        .map(|leased| leased.map_or(0, ByteLen::pages))
        .collect();
    let (mut left, mut passed_over, mut pages) = (wanted, 0, Vec::<Extent>::new());
    for stripe in 0.. {
        let first = PageIndex(stripe * u64::from(stripe_pages));
        let holders = pool.holders(first);
        let least = holders.iter().map(|server| room[server.as_usize()]).min().unwrap_or(0);
        let count = u32::try_from(least.min(left).min(stripe_pages.into())).expect("within a stripe");
        holders.iter().for_each(|server| room[server.as_usize()] -= u64::from(count));
        left -= u64::from(count);
        match pages.last_mut() {
            _ if count == 0 => passed_over += 1,
            Some(last) if last.end() == first && last.count < 1 << 30 => last.count += count,
            _ => pages.push(Extent::new(first, count)),
        }
        if left == 0 || passed_over > PASSED_OVER {
            break;
        }
    }
    pages
}

fn say_what_survives(pool: &Pool) {
    let servers = pool.servers().count();
    if pool.copies() > 1 {
        say_line(&format!(
            "rampool: 2 copies of each page, on {servers} servers: any one of them may be lost"
        ));
    } else if servers > 1 {
        say_line(
            "rampool: 1 copy of each page: if a server is lost, reads and writes of what lay there fail",
        );
    }
}

/// The kernel may be writing back because memory is short: this process's allocations are not to wait for
/// that. Without the right to say so (CAP_SYS_RESOURCE) everything works while memory is left.
fn write_under_pressure() {
    _ = rustix::process::configure_io_flusher_behavior(true);
}

/// Lets the kernel read ahead, and hold what is to be written, as for a disk. Only root may say so.
fn tune(directory: &Path) {
    let Ok(stat) = rustix::fs::stat(directory) else { return };
    let device = format!("{}:{}", rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let set = |name: &str, to: &str| std::fs::write(Path::new("/sys/class/bdi").join(&device).join(name), to);
    _ = set("read_ahead_kb", READ_AHEAD_KIB).and_then(|()| set("max_ratio", DIRTY_PERCENT));
}
