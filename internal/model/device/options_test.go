package device

import (
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
)

// The device applies every remedy of its backend, and refuses one of another backend.
func TestRemediesAreCarriedOutOrRefused(t *testing.T) {
	for _, r := range backends.Rules() {
		if r.Remedy == nil {
			continue
		}
		o := CUDAOptions{Backend: r.Backend.String(), Remedies: []backends.RemedyKind{r.Remedy.Kind}}
		got, err := o.remedies()
		if err != nil {
			t.Errorf("%s: remedy %s: %v", r.ID, r.Remedy.Kind, err)
		}
		o.Backend = backends.Flash.String()
		if _, err := o.remedies(); err == nil || !strings.Contains(err.Error(), r.Remedy.Kind.String()) {
			t.Errorf("flash with %s: %v", r.Remedy.Kind, err)
		}
		if got.zeroWorkspace != (r.Remedy.Kind == backends.ZeroWorkspace) {
			t.Errorf("%s: remedy %s clears the workspace: %t", r.ID, r.Remedy.Kind, got.zeroWorkspace)
		}
	}
}

func TestNoRemedyAsksForNothing(t *testing.T) {
	o := CUDAOptions{Backend: "fused"}
	if got, err := o.remedies(); err != nil || got != (kernelRequests{}) {
		t.Errorf("%+v, %v", got, err)
	}
}
