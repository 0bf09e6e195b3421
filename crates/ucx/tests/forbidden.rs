//! In a process of its own: after `forbid`, UCX is never loaded.

#[test]
fn nothing_is_loaded_where_that_is_forbidden() {
    rampool_ucx::forbid();
    assert_eq!(rampool_ucx::version(), Err(rampool_ucx::LoadError::Forbidden));
    let error = rampool_ucx::Context::process().expect_err("it was forbidden").to_string();
    assert!(error.contains("HOST:PORT"), "{error}");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libuc"), "it is loaded although it is forbidden");
}
