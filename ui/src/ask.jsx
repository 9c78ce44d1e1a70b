// A button for what cannot be undone: it says what will happen, and asks before it acts.
import { useRef } from "preact/hooks";

export function AskButton({ label, question, confirm, onConfirm }) {
  const dialog = useRef(null);
  const act = () => {
    dialog.current.close();
    onConfirm();
  };
  return (
    <>
      <button class="quiet" onClick={() => dialog.current.showModal()}>
        {label}
      </button>
      <dialog ref={dialog} aria-label={confirm}>
        <p>{question}</p>
        <button autofocus onClick={() => dialog.current.close()}>
          Cancel
        </button>{" "}
        <button class="danger" onClick={act}>
          {confirm}
        </button>
      </dialog>
    </>
  );
}
