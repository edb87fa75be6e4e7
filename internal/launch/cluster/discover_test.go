package cluster

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/launch"
)

// TestAgentsFindEachOtherByGossip checks that agents agree over ports that also carry gossip, and that each agent learns
// of all others.
func TestAgentsFindEachOtherByGossip(t *testing.T) {
	hosts := joinAll(t, 3, nil)
	forAll(t, hosts, func(h *host) error {
		if _, err := h.starts(t.Context()); err != nil {
			return err
		}
		waitFor(t, h, func(c *coordinator) bool { return len(c.search.hints) == 2 })
		v := h.End(t.Context(), launch.Ending{})
		if v.ExitCode != launch.ExitDone {
			return fmt.Errorf("verdict %+v", v)
		}
		return h.Close(v.ExitCode, "")
	})
}
