//! The part of `ucp.h` that is used here, of API 1.12 and later. Structures only grow: each says in a mask
//! which of its fields are meant.

use crate::Status;
use libc::{c_char, c_int, c_uint, c_void, size_t};
use std::{ffi::CStr, mem::transmute};

/// The oldest API that this crate uses.
pub const API: (c_uint, c_uint) = (1, 12);

pub const FEATURE_WAKEUP: u64 = 1 << 4;
pub const FEATURE_AM: u64 = 1 << 6;
pub const PARAM_FEATURES: u64 = 1 << 0;
pub const PARAM_MT_WORKERS_SHARED: u64 = 1 << 5;
pub const ATTR_THREAD_MODE: u64 = 1 << 1;
pub const WORKER_THREAD_MODE: u64 = 1 << 0;
pub const THREADS_SERIALIZED: c_int = 1;
pub const THREADS_MULTI: c_int = 2;
pub const AM_HANDLER_ALL: u64 = 0b1111;
pub const AM_WHOLE_MESSAGE: u32 = 1;
pub const AM_CAME_IN_MEMORY_TO_KEEP: u64 = 1 << 16;
pub const AM_CAME_AS_RENDEZVOUS: u64 = 1 << 17;
pub const AM_EAGER: u32 = 1 << 1;
pub const ENDPOINT_REMOTE_ADDRESS: u64 = 1 << 0;
pub const ENDPOINT_ERROR_MODE: u64 = 1 << 1;
pub const ENDPOINT_ERROR_HANDLER: u64 = 1 << 2;
pub const ERRORS_NONE: c_int = 0;
pub const ERRORS_PEER: c_int = 1;
pub const OP_CALLBACK: u32 = 1 << 1;
pub const OP_USER_DATA: u32 = 1 << 2;
pub const OP_FLAGS: u32 = 1 << 4;
pub const CLOSE_BY_FORCE: u32 = 1;

macro_rules! opaque {
    ($($name:ident),*) => { $(
        #[repr(C)]
        pub struct $name { _private: [u8; 0] }
    )* };
}
opaque!(Config, RawContext, RawWorker, RawEndpoint, Address);

#[repr(C)]
pub struct ContextParams {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: size_t,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: size_t,
    pub estimated_num_ppn: size_t,
    pub name: *const c_char,
}

#[repr(C)]
pub struct ContextAttributes {
    pub field_mask: u64,
    pub request_size: size_t,
    pub thread_mode: c_int,
    pub rest: [u64; 5],
    /// Later versions have more.
    pub reserve: [u64; 24],
}

#[repr(C)]
pub struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_int,
    pub rest: [u64; 23],
    /// Later versions have more.
    pub reserve: [u64; 24],
}

#[repr(C)]
pub struct AmHandlerParams {
    pub field_mask: u64,
    pub id: c_uint,
    pub flags: u32,
    pub callback: AmCallback,
    pub argument: *mut c_void,
}

pub type AmCallback = unsafe extern "C" fn(
    argument: *mut c_void,
    header: *const c_void,
    header_len: size_t,
    data: *mut c_void,
    len: size_t,
    how: *const AmReceived,
) -> Status;

#[repr(C)]
pub struct AmReceived {
    pub attributes: u64,
    pub reply_to: *mut RawEndpoint,
}

#[repr(C)]
pub struct ErrorHandler {
    pub callback: unsafe extern "C" fn(argument: *mut c_void, endpoint: *mut RawEndpoint, status: Status),
    pub argument: *mut c_void,
}

#[repr(C)]
pub struct EndpointParams {
    pub field_mask: u64,
    pub address: *const Address,
    pub error_mode: c_int,
    pub error_handler: ErrorHandler,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub socket_address: [u64; 2],
    pub rest: [u64; 4],
    /// Later versions have more.
    pub reserve: [u64; 24],
}

#[repr(C)]
pub struct RequestParams {
    pub mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub callback: Option<SentCallback>,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_int,
    pub receive_info: *mut c_void,
    pub memory: *mut c_void,
    /// Later versions have more.
    pub reserve: [u64; 8],
}

pub type SentCallback = unsafe extern "C" fn(request: *mut c_void, status: Status, user_data: *mut c_void);

// As `ucp.h` of 1.13 has them.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ContextParams>() == 80 && offset_of!(ContextParams, mt_workers_shared) == 48);
    assert!(offset_of!(ContextAttributes, thread_mode) == 16);
    assert!(offset_of!(WorkerParams, rest) == 16);
    assert!(size_of::<AmHandlerParams>() == 32 && offset_of!(AmHandlerParams, callback) == 16);
    assert!(size_of::<AmReceived>() == 16);
    assert!(
        offset_of!(EndpointParams, error_handler) == 24 && offset_of!(EndpointParams, socket_address) == 56
    );
    assert!(
        offset_of!(RequestParams, callback) == 16
            && offset_of!(RequestParams, user_data) == 32
            && offset_of!(RequestParams, memory) == 64
    );
};

macro_rules! functions {
    ($($field:ident: $symbol:literal fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of UCX, once found.
        pub struct Functions { $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Functions {
            /// Finds each by its name.
            ///
            /// # Errors
            /// The name of a missing function.
            ///
            /// # Safety
            /// `find` returns UCX's function of that name.
            pub unsafe fn find(mut find: impl FnMut(&CStr) -> *mut c_void) -> Result<Self, &'static str> {
                $(
                    let $field = find($symbol);
                    if $field.is_null() {
                        return Err($symbol.to_str().expect("a name"));
                    }
                )*
                Ok(Self { $(
                    // SAFETY: it is the function of this name, whose signature `ucp.h` gives so.
                    $field: unsafe {
                        transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>($field)
                    },
                )* })
            }
        }
    };
}

functions! {
    get_version: c"ucp_get_version" fn(*mut c_uint, *mut c_uint, *mut c_uint);
    status_string: c"ucs_status_string" fn(Status) -> *const c_char;
    config_read: c"ucp_config_read" fn(*const c_char, *const c_char, *mut *mut Config) -> Status;
    config_modify: c"ucp_config_modify" fn(*mut Config, *const c_char, *const c_char) -> Status;
    config_release: c"ucp_config_release" fn(*mut Config);
    init_version: c"ucp_init_version"
        fn(c_uint, c_uint, *const ContextParams, *const Config, *mut *mut RawContext) -> Status;
    cleanup: c"ucp_cleanup" fn(*mut RawContext);
    context_query: c"ucp_context_query" fn(*mut RawContext, *mut ContextAttributes) -> Status;
    context_print: c"ucp_context_print_info" fn(*const RawContext, *mut libc::FILE);
    worker_create: c"ucp_worker_create"
        fn(*mut RawContext, *const WorkerParams, *mut *mut RawWorker) -> Status;
    worker_destroy: c"ucp_worker_destroy" fn(*mut RawWorker);
    worker_get_address: c"ucp_worker_get_address"
        fn(*mut RawWorker, *mut *mut Address, *mut size_t) -> Status;
    worker_release_address: c"ucp_worker_release_address" fn(*mut RawWorker, *mut Address);
    worker_get_efd: c"ucp_worker_get_efd" fn(*mut RawWorker, *mut c_int) -> Status;
    worker_arm: c"ucp_worker_arm" fn(*mut RawWorker) -> Status;
    worker_progress: c"ucp_worker_progress" fn(*mut RawWorker) -> c_uint;
    set_am_handler: c"ucp_worker_set_am_recv_handler" fn(*mut RawWorker, *const AmHandlerParams) -> Status;
    endpoint_create: c"ucp_ep_create"
        fn(*mut RawWorker, *const EndpointParams, *mut *mut RawEndpoint) -> Status;
    endpoint_close: c"ucp_ep_close_nbx" fn(*mut RawEndpoint, *const RequestParams) -> *mut c_void;
    endpoint_flush: c"ucp_ep_flush_nbx" fn(*mut RawEndpoint, *const RequestParams) -> *mut c_void;
    am_send: c"ucp_am_send_nbx"
        fn(*mut RawEndpoint, c_uint, *const c_void,
            size_t, *const c_void, size_t, *const RequestParams) -> *mut c_void;
    am_release: c"ucp_am_data_release" fn(*mut RawWorker, *mut c_void);
    request_status: c"ucp_request_check_status" fn(*mut c_void) -> Status;
    request_free: c"ucp_request_free" fn(*mut c_void);
}
