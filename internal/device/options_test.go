package device

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/backends"
)

// TestRemediesAreCarriedOutOrRefused holds what the device does to what the rules say is built: a
// choice of this build relies on nothing that is refused here.
func TestRemediesAreCarriedOutOrRefused(t *testing.T) {
	for _, r := range backends.Rules() {
		if r.Remedy.Kind == backends.NoRemedy {
			continue
		}
		o := CUDAOptions{Backend: r.Backend.String(), Remedies: []backends.RemedyKind{r.Remedy.Kind}}
		got, err := o.remedies()
		if (err == nil) != r.Remedy.Built {
			t.Errorf("%s: remedy %s, built %t: %v", r.ID, r.Remedy.Kind, r.Remedy.Built, err)
		}
		if err != nil && !strings.Contains(err.Error(), r.Remedy.Kind.String()) {
			t.Errorf("%s: %v does not name %s", r.ID, err, r.Remedy.Kind)
		}
		if got.zeroWorkspace != (r.Remedy.Kind == backends.ZeroWorkspace) {
			t.Errorf("%s: remedy %s clears the workspace: %t", r.ID, r.Remedy.Kind, got.zeroWorkspace)
		}
	}
}

func TestNoRemedyAsksForNothing(t *testing.T) {
	o := CUDAOptions{Backend: "fused"}
	if got, err := o.remedies(); err != nil || got != (remedied{}) {
		t.Errorf("%+v, %v", got, err)
	}
}
