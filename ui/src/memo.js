// A component without hooks that is drawn again only if one of its properties is another value.
import { Component } from "preact";

export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const before = this.props;
      for (const name in next) if (before[name] !== next[name]) return true;
      for (const name in before) if (!(name in next)) return true;
      return false;
    }

    render() {
      return draw(this.props);
    }
  };
}
