// What the theme leaves out: a name of its search, what scrolls to be reached by keys, and a button is no landmark.
new MutationObserver(() => {
  document.querySelector(".md-search:not([aria-label])")?.setAttribute("aria-label", "Search");
  document.querySelectorAll("[class$=__scrollwrap]:not([tabindex])").forEach((one) => (one.tabIndex = 0));
  document.querySelectorAll("nav.md-code__nav:not([role])").forEach((one) => one.setAttribute("role", "presentation"));
}).observe(document.documentElement, { childList: true, subtree: true });
