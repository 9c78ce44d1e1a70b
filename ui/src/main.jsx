// The page: sign-in, the rail of places, and the view that the address names.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { post, readOnce, useVisitor } from "./api.js";
import { Compare } from "./compare.jsx";
import { Engines } from "./engines.jsx";
import { Events } from "./events.jsx";
import { Bird, Icon } from "./icons.jsx";
import { NotFound, Toast, useOpen, useRead } from "./parts.jsx";
import { Playground } from "./playground.jsx";
import { useRoute, useTitle } from "./route.js";
import { Run } from "./run.jsx";
import { Runs } from "./runs.jsx";
import { hasUnread } from "./severity.js";
import { Tenants } from "./tenants.jsx";
import "./tooltips.js";
import "./style/tokens.css";
import "./style/base.css";
import "./style/shell.css";
import "./style/controls.css";
import "./style/runs.css";
import "./style/run.css";
import "./style/panel.css";
import "./style/engines.css";
import "./style/playground.css";
import "./style/lists.css";
import "./style/states.css";
import "./style/narrow.css";

const PLACES = [
  ["", "Runs", "runs"],
  ["playground", "Playground", "play"],
  ["engines", "Engines", "engines"],
  ["tenants", "Tenants", "tenants"],
  ["events", "Events", "events"],
];
const ALIASES = { session: "run", placement: "engines" };
const PARENTS = { run: "", compare: "" };

function Page() {
  const [visitor, enter] = useVisitor();
  const { parts, query } = useRoute();
  const [named = "", ...args] = parts;
  const view = ALIASES[named] ?? named;
  const unfolded = useOpen(); // The list of runs is as it was when the visitor comes back.
  const main = useRef(null);
  const last = useRef(view);
  useEffect(() => {
    if (last.current === view) return;
    last.current = view;
    scrollTo(0, 0);
    main.current?.focus({ preventScroll: true });
  }, [view]);
  const leave = () => post("leave").then(() => enter(null));
  if (visitor === undefined) return null;
  if (visitor === null) return <Entry enter={enter} />;
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          main.current.focus();
        }}
      >
        Skip to content
      </a>
      <Rail place={PARENTS[view] ?? view} visitor={visitor} leave={leave} />
      <main id="main" tabindex="-1" ref={main}>
        <View {...{ view, args, query, visitor, leave, unfolded }} />
      </main>
      <Toast />
    </>
  );
}

function View({ view, args, query, visitor, leave, unfolded }) {
  switch (view) {
    case "":
      return <Runs query={query} unfolded={unfolded} />;
    case "run":
      return (
        <Run
          key={args[0]}
          id={args[0]}
          shown={args[1]}
          group={query.get("group")}
          visitor={visitor}
        />
      );
    case "compare":
      return <Compare ids={args} />;
    case "playground":
      return <Playground visitor={visitor} />;
    case "engines":
      return <Engines isOperator={visitor.tenant === null} />;
    case "tenants":
      return <Tenants visitor={visitor} leave={leave} />;
    case "events":
      return <Events isOperator={visitor.tenant === null} query={query} />;
    default:
      return <NotFound what="page" />;
  }
}

function Rail({ place, visitor, leave }) {
  const isUnread = useUnread(place);
  return (
    <header class="rail">
      <a class="brand" href="#/" aria-label="Parrot: all runs">
        <Bird />
      </a>
      <nav aria-label="Places">
        {PLACES.map(([path, name, icon]) => (
          <a
            key={path}
            class="place"
            href={`#/${path}`}
            aria-current={place === path ? "page" : undefined}
          >
            <Icon name={icon} />
            {name}
            {path === "events" && isUnread && (
              <>
                <span class="pip" />
                <span class="sr">, a serious one is new</span>
              </>
            )}
          </a>
        ))}
      </nav>
      <button
        class="place who"
        type="button"
        title={
          visitor.tenant === null
            ? "Signed in as operator"
            : `Signed in as tenant ${visitor.tenant}`
        }
        onClick={leave}
      >
        <Icon name="out" />
        Sign out
      </button>
    </header>
  );
}

/** Whether a serious event is newer than the last visit to the events, at each change of place. */
const useUnread = (place) =>
  useRead(() => readOnce("events").then(hasUnread), false, [place]) && place !== "events";

function Entry({ enter }) {
  useTitle("Sign in");
  const [key, setKey] = useState("");
  const [error, setError] = useState("");
  const submit = (event) => {
    event.preventDefault();
    post("enter", { key: key.trim() }).then(enter, (failure) => setError(failure.message));
  };
  return (
    <main class="entry">
      <div class="empty">
        <Bird />
        <h1>Sign in to Parrot</h1>
        <p>
          <code>parrot page</code> on the server's machine prints an address with the page's key,
          which shows all runs. An API key shows the runs of its tenant.
        </p>
        <form onSubmit={submit}>
          <label for="key" class="sr">
            Page key or API key
          </label>
          <p class="acts">
            <input
              id="key"
              class="field"
              type="password"
              placeholder="Page key or API key"
              autocomplete="current-password"
              value={key}
              onInput={(event) => setKey(event.target.value)}
            />
            <button class="btn main">Sign in</button>
          </p>
          <p class="st failed" role="alert">
            {error}
          </p>
        </form>
      </div>
    </main>
  );
}

addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest?.("input, textarea, select")) return;
  const search = document.querySelector("input[type=search]");
  if (!search) return;
  event.preventDefault();
  search.focus();
});

render(<Page />, document.getElementById("app"));
