// What the theme leaves without a name: its search, and each button that copies, which is no landmark.
new MutationObserver(() => {
  document.querySelector(".md-search:not([aria-label])")?.setAttribute("aria-label", "Search");
  document.querySelectorAll("nav.md-code__nav:not([role])").forEach((one) => one.setAttribute("role", "presentation"));
}).observe(document.documentElement, { childList: true, subtree: true });
