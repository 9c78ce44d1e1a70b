// A button for an action that cannot be undone. It says what will happen, and asks before it acts.
import { useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { say } from "./parts.jsx";

export function AskButton({ label, title, question, confirm, keep, onConfirm, disabled }) {
  const dialog = useRef(null);
  const [isOpen, setOpen] = useState(false);
  const id = useId();
  useLayoutEffect(() => {
    if (isOpen) dialog.current.showModal();
  }, [isOpen]);
  const act = () => {
    dialog.current.close();
    Promise.resolve(onConfirm()).catch((failure) => say(failure.message));
  };
  return (
    <>
      <button
        class="btn small danger"
        type="button"
        disabled={disabled}
        onClick={() => setOpen(true)}
      >
        {label}
      </button>
      <dialog
        ref={dialog}
        aria-labelledby={`${id}-title`}
        aria-describedby={`${id}-text`}
        onClose={() => setOpen(false)}
      >
        {isOpen && (
          <>
            <h2 id={`${id}-title`}>{title}</h2>
            <p id={`${id}-text`}>{question}</p>
            <div class="acts">
              <button class="btn" type="button" autofocus onClick={() => dialog.current.close()}>
                {keep}
              </button>
              <button class="btn danger main" type="button" onClick={act}>
                {confirm}
              </button>
            </div>
          </>
        )}
      </dialog>
    </>
  );
}
