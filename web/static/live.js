// Keeps the overview fresh, and says so when it cannot. The page is complete without this file.
(function () {
  "use strict";

  const page = document.getElementById("overview");
  const button = document.getElementById("pause");
  const state = document.getElementById("refresh-state");
  const lost = document.getElementById("lost");
  const lostSince = document.getElementById("lost-since");
  let paused = false;

  function clock() {
    return new Date().toISOString().slice(11, 19) + " UTC";
  }

  function showState() {
    state.textContent = paused ? "Paused at " + clock() : "Live";
    button.textContent = paused ? "Resume" : "Pause";
    button.setAttribute("aria-pressed", String(paused));
  }

  function failed() {
    if (lost.hidden) {
      lostSince.textContent = clock();
      lost.hidden = false;
    }
  }

  // What a person opened stays open: the server's fragment knows nothing of it.
  Idiomorph.defaults.callbacks.beforeAttributeUpdated = function (name, node) {
    return !(name === "open" && node.tagName === "DETAILS");
  };

  button.addEventListener("click", function () {
    paused = !paused;
    showState();
    if (!paused) {
      htmx.trigger(page, "refresh");
    }
  });

  page.addEventListener("htmx:beforeRequest", function (event) {
    if (paused || document.hidden) {
      event.preventDefault();
    }
  });

  // An answer that was under way when the page was paused is not shown either.
  page.addEventListener("htmx:beforeSwap", function (event) {
    if (paused) {
      event.detail.shouldSwap = false;
    }
  });

  page.addEventListener("htmx:afterRequest", function (event) {
    if (event.detail.successful) {
      lost.hidden = true;
    }
  });
  page.addEventListener("htmx:sendError", failed);
  page.addEventListener("htmx:responseError", failed);
  page.addEventListener("htmx:timeout", failed);

  document.addEventListener("visibilitychange", function () {
    if (!document.hidden && !paused) {
      htmx.trigger(page, "refresh");
    }
  });

  button.hidden = false;
  showState();
})();
