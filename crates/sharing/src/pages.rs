//! Tables that a protocol keeps by page.

use std::collections::{BTreeMap, BTreeSet};

use rampool_wire::units::{Extent, PageIndex};

/// Removes the entries of these pages from `map`, and returns them.
pub(crate) fn take_pages<V>(map: &mut BTreeMap<PageIndex, V>, pages: Extent) -> Vec<(PageIndex, V)> {
    let known: Vec<PageIndex> = map.range(pages.first..pages.end()).map(|(&page, _)| page).collect();
    known.into_iter().filter_map(|page| map.remove(&page).map(|value| (page, value))).collect()
}

/// Like [`take_pages`], of a set.
pub(crate) fn unlist_pages(set: &mut BTreeSet<PageIndex>, pages: Extent) {
    let known: Vec<PageIndex> = set.range(pages.first..pages.end()).copied().collect();
    for page in known {
        set.remove(&page);
    }
}
