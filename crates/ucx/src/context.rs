//! UCX in a process: its devices and transports.

use crate::api::{
    API, ATTR_THREAD_MODE, Config, ContextAttributes, ContextParams, FEATURE_AM, FEATURE_WAKEUP, Functions,
    PARAM_FEATURES, PARAM_MT_WORKERS_SHARED, RawContext, THREADS_MULTI,
};
use crate::library::{library, text};
use crate::{Status, UcxError};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

/// Devices and transports, for connections of any thread. Cheap to clone.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    functions: &'static Functions,
    raw: *mut RawContext,
}

// SAFETY: made for workers of several threads (`mt_workers_shared`), which `open` makes sure that this UCX
// can.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    /// The context that the connections of this process share, with the devices and transports that UCX's own
    /// variables choose (`UCX_TLS`, `UCX_NET_DEVICES`). It is made on first use. Blocks while UCX looks at
    /// the machine: mostly some tens of milliseconds.
    ///
    /// # Errors
    /// [`UcxError`]; every later call returns the same one.
    pub fn process() -> Result<Self, UcxError> {
        static PROCESS: OnceLock<Result<Context, UcxError>> = OnceLock::new();
        library()?;
        PROCESS.get_or_init(|| Self::open(None)).clone()
    }

    /// A context of its own, with these transports (in the form of `UCX_TLS`) or those that UCX's variables
    /// choose.
    ///
    /// # Errors
    /// [`UcxError`].
    pub fn open(transports: Option<&str>) -> Result<Self, UcxError> {
        let functions = &library()?.functions;
        let check =
            |what, status| if status == Status::OK { Ok(()) } else { Err(UcxError::Call { what, status }) };
        let mut config: *mut Config = null_mut();
        // SAFETY: no prefix and no file: both may be null; a place to write to.
        check("read its settings", unsafe {
            (functions.config_read)(std::ptr::null(), std::ptr::null(), &raw mut config)
        })?;
        let mut settings = vec![
            // Sent bytes are copied by us already; registering each piece would cost more than copying it
            // once more.
            ("ZCOPY_THRESH", "inf"),
            // To check now and then whether a peer lives, UCX adds a datagram transport to a reliable
            // connection, and then makes the whole connection over that. If the connection is closed while it
            // waits for a peer that has gone before it answered, UCX before 1.14 ends the process. Without
            // this check the connection uses its proper transport, which can be closed at any time. UCX is
            // not asked whether a peer lives: the TCP connection next to it tells.
            ("KEEPALIVE_INTERVAL", "inf"),
        ];
        settings.extend(transports.map(|transports| ("TLS", transports)));
        let mut raw: *mut RawContext = null_mut();
        let result = settings
            .into_iter()
            .try_for_each(|(name, value)| {
                // SAFETY: settings as they were read, and two texts.
                let status =
                    unsafe { (functions.config_modify)(config, text(name).as_ptr(), text(value).as_ptr()) };
                check("take its settings", status)
            })
            .and_then(|()| {
                let params = ContextParams {
                    field_mask: PARAM_FEATURES | PARAM_MT_WORKERS_SHARED,
                    // No remote memory access: over sockets it would let a peer write anywhere.
                    features: FEATURE_AM | FEATURE_WAKEUP,
                    request_size: 0,
                    request_init: std::ptr::null(),
                    request_cleanup: std::ptr::null(),
                    tag_sender_mask: 0,
                    mt_workers_shared: 1,
                    estimated_num_eps: 0,
                    estimated_num_ppn: 0,
                    name: std::ptr::null(),
                };
                // SAFETY: parameters whose mask names the fields in use, settings as they were read, and a
                // place to write to.
                let status = unsafe {
                    (functions.init_version)(API.0, API.1, &raw const params, config, &raw mut raw)
                };
                check("find a device or transport", status)
            });
        // SAFETY: the settings, not used from here on.
        unsafe { (functions.config_release)(config) };
        result?;
        let context = Self(Arc::new(Inner { functions, raw }));
        let mut attributes = ContextAttributes {
            field_mask: ATTR_THREAD_MODE,
            request_size: 0,
            thread_mode: 0,
            rest: [0; 5],
            reserve: [0; 24],
        };
        // SAFETY: a context, and a place to write to, with room to spare.
        check("report its features", unsafe { (functions.context_query)(raw, &raw mut attributes) })?;
        if attributes.thread_mode != THREADS_MULTI {
            return Err(UcxError::Call {
                what: "serve several threads: it was built without --enable-mt",
                status: Status::UNREACHABLE,
            });
        }
        Ok(context)
    }

    /// The transports and devices, as `tcp/eth0`, in UCX's order; at least those that UCX's own listing
    /// names.
    #[must_use]
    pub fn transports(&self) -> Vec<String> {
        let (mut bytes, mut len) = (null_mut::<libc::c_char>(), 0);
        // SAFETY: places to write to, which live until the stream is closed.
        let stream = unsafe { libc::open_memstream(&raw mut bytes, &raw mut len) };
        if stream.is_null() {
            return Vec::new();
        }
        // SAFETY: a context and a stream; once that is closed, the bytes are its content, ours to free.
        let listing = unsafe {
            (self.0.functions.context_print)(self.0.raw, stream);
            libc::fclose(stream);
            let listing =
                String::from_utf8_lossy(std::slice::from_raw_parts(bytes.cast::<u8>(), len)).into_owned();
            libc::free(bytes.cast());
            listing
        };
        let resources = listing.lines().filter(|line| line.contains("resource ") && line.contains(" -- "));
        resources
            .filter_map(|line| line.rsplit_once(" -- ").map(|(_, name)| name.trim().to_owned()))
            .collect()
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.0.functions
    }

    pub(crate) fn raw(&self) -> *mut RawContext {
        self.0.raw
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ucx::Context")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything made from it holds a reference to it, so nothing is left.
        unsafe { (self.functions.cleanup)(self.raw) };
    }
}
