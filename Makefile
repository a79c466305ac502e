# Everything a person does with this repository. "make help" lists it.
# Needs Go, Python 3 with pip, make and git; the tests also need Node with npm. With a C compiler
# they look for data races.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The race detector needs cgo.
RACE := $(shell command -v "$$(go env CC)" >/dev/null 2>&1 && echo -race)
TEST_FLAGS ?=
# The latest commit of the previous minor version. Its programs and those of this one must work together.
PREVIOUS := 84205fc

# These judge a whole Berth. All but e2e judge it while its parts are killed: two of those at one
# time would keep one another from making progress. e2e runs tests in parallel by itself, and without the race
# detector: its programs are those that a user runs.
SUITES := ./e2e ./e2e/chaos ./e2e/reaping ./e2e/soak
# What these test starts no goroutine. The race detector would find nothing and make them slow.
CORE := ./allocator/core
SEQUENTIAL := $(CORE) ./charts ./tools/docs ./tools/images ./tools/mutate
tool = go tool -modfile=tools/$(1).mod

## help: list the targets
.PHONY: help
help:
	@sed -n 's/^## \([a-z0-9-]*\): /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-15s %s\n", $$1, $$2}'

## build: build all programs into bin/
.PHONY: build
build:
	@echo "building Berth's programs (two or three minutes the first time)"
	@CGO_ENABLED=0 go build -trimpath -o bin/ ./cmd/...

## demo: start everything, claim a sandbox, show a request reach it; ONCE=1 ends after that
.PHONY: demo
demo: build
	@exec bin/berth-dev demo $(if $(ONCE),--once)

## ground: build or fetch etcd, kube-apiserver and Envoy into the cache (minutes, the first time only)
.PHONY: ground
ground: build
	@bin/berth-dev build

## test: every test, on the real parts
.PHONY: test
test: ground
	@[ -n "$(RACE)" ] || echo "no C compiler: the race detector is off"
	@$(MAKE) --no-print-directory -j2 -k test-suites test-sequential test-memory test-monitoring test-packages

# The suites wait for half of their time. The others use the rest of it, at the lowest priority.
# The suites build the programs that they judge. The test cache does not know that, so they run always.
.PHONY: test-suites test-sequential test-memory test-monitoring test-packages
test-suites:
	@failed=0; for suite in $(SUITES); do \
		race=$(RACE); [ $$suite != ./e2e ] || race=; \
		(set -x; go test $$race -timeout 40m $(TEST_FLAGS) -count=1 $$suite) || failed=1; done; exit $$failed
test-sequential:
	nice -n 19 go test -timeout 25m $(TEST_FLAGS) $(SEQUENTIAL)
# The race detector multiplies what this test measures, so it has none.
test-memory:
	nice -n 19 go test $(TEST_FLAGS) ./allocator -run '^TestFullJournalTakeoverNeedsHalfTheMemory$$'
# A module of its own.
# The tests read files of the chart, which the test cache of that module does not see.
test-monitoring:
	cd tools/monitoring && nice -n 19 go test $(TEST_FLAGS) -count=1 ./...
test-packages:
	nice -n 19 go test $(RACE) -timeout 20m $(TEST_FLAGS) -p 3 $$(go list ./... | grep -v -x -F "$$(go list $(SUITES) $(SEQUENTIAL))")

## test-short: the tests that need no real parts, in seconds
.PHONY: test-short
test-short:
	go test -short ./...

# Package below ./agent, and target.
AGENT_FUZZ := ./FuzzRequestsWithoutToken accounts/FuzzAddDefault accounts/FuzzLookup accounts/FuzzNamed archive/FuzzRestore \
	files/FuzzCalls files/FuzzCheckSignature files/FuzzDownload files/FuzzResolve files/FuzzUpload \
	initbox/FuzzOpen initbox/FuzzOpenContents initbox/FuzzOpenOrder initbox/FuzzOpenOrderContents process/FuzzCalls process/FuzzStart

## envoy-gateway: send requests through Envoy Gateway, the one of tools/envoygateway.mod; minutes to build, not part of CI
.PHONY: envoy-gateway
envoy-gateway: ground
	go test $(RACE) ./envoy -run '^TestRequestsThroughEnvoyGateway$$' -count=1 -v -timeout 30m \
		-envoy.gateway="$$($(call tool,envoygateway) -n envoy-gateway)"

## h2spec: let h2spec, the one of tools/h2spec.mod, judge extproc/h2; not part of CI
.PHONY: h2spec
h2spec:
	go test ./extproc/h2 -run H2spec -count=1 -v -h2spec="$$($(call tool,h2spec) -n h2spec)"

## test-long: fuzz the parsers, run the model tests for longer, take the control plane away for longer; not part of CI
.PHONY: test-long
test-long: ground
	go test ./extproc -run '^$$' -fuzz FuzzHost -fuzztime 5m
	go test ./extproc -run '^$$' -fuzz FuzzPath -fuzztime 5m
	@set -e; for fuzz in $(AGENT_FUZZ); do \
		set -x; go test ./agent/$${fuzz%/*} -run '^$$' -fuzz "^$${fuzz#*/}\$$" -fuzztime 5m; { set +x; } 2>/dev/null; done
	go test ./extproc/wire -run '^$$' -fuzz FuzzRequest -fuzztime 10m
	go test ./extproc/wire -run '^$$' -fuzz FuzzAdmission -fuzztime 2m
	go test ./extproc/h2 -run '^$$' -fuzz FuzzConnection -fuzztime 5m
	go test ./extproc/h2 -run '^$$' -fuzz FuzzBothServers -fuzztime 5m
	go test ./allocator/core -count=1 -timeout 90m -run AnyHistory -rapid.checks=6000
	go test ./routecache -count=1 -timeout 30m -rapid.checks=20000
	go test ./envoy -count=1 -timeout 20m -run TestThousandsOfWebSocketsStayOpen -envoy.websockets=5m
	$(MAKE) --no-print-directory envoy-gateway
	go test $(RACE) -timeout 60m -count=5 ./devcluster/...
	go test $(RACE) -timeout 60m -count=3 ./e2e -e2e.long
	go test -timeout 60m -count=1 -v ./e2e -run TestLatestSDKsAndFrameworksWork -e2e.latest
	go test -timeout 30m -count=1 -v ./e2e -run TestDashboardsHaveDataAndAlertsFireAndEnd -e2e.prometheus=$$(tools/prometheus prometheus)
	go test -timeout 30m -count=1 -v ./e2e -run TestAgentDoesNotGrowUnderTheSDKs -e2e.loops=10m
	go test $(RACE) -timeout 60m -count=1 ./e2e/chaos -chaos.long -chaos.from=$(PREVIOUS)
	go test $(RACE) -timeout 60m -count=1 ./e2e/reaping -reaping.duration=5m -reaping.reaps=500
	go test $(RACE) -timeout 60m -count=1 ./e2e/soak -soak.duration=10m
	BERTH_E2E_OUTAGE=10m go test $(RACE) -timeout 30m -count=1 ./e2e -run TestKnownSandboxesKeepTrafficThroughAnOutage

# The soak bounds itself: DURATION, and some minutes in which it ends.
## soak: kill, stop and cut off everything under load for DURATION (10m), with SEED if set; 0 mismatches
.PHONY: soak
soak: ground
	@mkdir -p bin
	go test ./e2e/soak -run '^TestNoRequestReachesTheWrongSandboxUnderFaults$$' -count=1 -v -timeout 0 \
		-soak.duration=$(or $(DURATION),10m) -soak.seed=$(or $(SEED),0) -soak.rate=$(or $(RATE),0) -soak.history=$(CURDIR)/bin/soak-history.jsonl
	@echo "the history is in bin/soak-history.jsonl; go run ./e2e/judge bin/soak-history.jsonl judges it again"

# So does this one.
## reap-soak: the same for idle timeouts, for DURATION (10m), with SEED if set; 0 false reaps, and all that is silent is reaped
.PHONY: reap-soak
reap-soak: ground
	@mkdir -p bin
	go test ./e2e/reaping -run '^TestOnlySilentSandboxesAreReapedUnderFaults$$' -count=1 -v -timeout 0 \
		-reaping.duration=$(or $(DURATION),10m) -reaping.seed=$(or $(SEED),0) -reaping.history=$(CURDIR)/bin/reaping-history.jsonl
	@echo "the history is in bin/reaping-history.jsonl; go run ./e2e/judge bin/reaping-history.jsonl judges it again"

## rollouts: restart gateways, Envoys, routers and leaders TIMES (20) times each beside RATE (500) requests a second; none may fail; 10 minutes
.PHONY: rollouts
rollouts: ground
	go test ./e2e -run '^TestPlannedRestartsFailNoRequest$$' -count=1 -v -timeout 0 -rollouts.times=$(or $(TIMES),20) -rollouts.rate=$(or $(RATE),500)

## mutate: break one promise after the other and see its test fail; BREAKS="fence uid-ignored" chooses some; minutes
.PHONY: mutate
mutate: ground
	go run ./tools/mutate $(BREAKS)

## check-mutations: list every break of make mutate that does not apply, does not compile or names no test
.PHONY: check-mutations
check-mutations:
	go run ./tools/mutate --check

## spec: check the specification of the fence with TLC, and see it find each broken rule; TLA2TOOLS names the jar, otherwise it is fetched; minutes; needs Java
.PHONY: spec
spec:
	@TLA2TOOLS=$(TLA2TOOLS) nice -n 10 tools/spec

## kind-e2e: the end-to-end suite and the chart on a kind cluster of its own; KIND_NODE_IMAGE names the node's image, SKIP tests to leave out
.PHONY: kind-e2e
kind-e2e: build image-archives
	BERTH_E2E_PROVIDER=kind go test ./e2e -count=1 -timeout 30m -v $(if $(SKIP),-skip '$(SKIP)')

## kind-egress: try from a sandbox what it may not reach, on a kind cluster whose policies the kube-router of tools/kuberouter.mod enforces; needs root and ipset; not part of CI
.PHONY: kind-egress
kind-egress: build image-archives
	BERTH_E2E_PROVIDER=kind BERTH_E2E_KUBE_ROUTER="$$($(call tool,kuberouter) -n kube-router)" \
		go test ./e2e -count=1 -timeout 20m -v -run '^TestEnforcedNetworkLeavesASandboxItsGatewayOnly$$'

## browser-e2e: pages, private links, a dev server with hot reload and the console in Chromium
.PHONY: browser-e2e
browser-e2e: ground chromium
	BERTH_E2E_CHROMIUM=$$(command -v chromium) go test ./e2e -count=1 -timeout 20m -run Chromium -v

## screenshots: the same tests of the console, and their pictures into docs/img; 12 minutes more, for charts with a history
.PHONY: screenshots
screenshots: ground chromium
	@mkdir -p docs/img
	BERTH_E2E_CHROMIUM=$$(command -v chromium) BERTH_E2E_SHOTS=$(CURDIR)/docs/img go test ./e2e -count=1 -timeout 45m -run 'Console.*Chromium|Thousands.*Chromium' -v

## chromium: install Debian's Chromium if there is none; needs root
.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium; }

## bench: what a request costs: direct, through Envoy, through Berth
.PHONY: bench
bench: ground
	go test ./bench -run '^$$' -bench Latency -benchtime 1x -timeout 20m -v

## bench-hop: what the hop costs beside other ways to the same sandboxes, into docs/benchmarks/hop; 15 minutes; HOP_QUICK=1: 3 minutes and no files; ABLATE=1: without one part each; ADDRESSES=1: new addresses; MILLION=1: a million requests, none of which may fail
.PHONY: bench-hop
bench-hop:
	go run ./bench/hop $(if $(HOP_QUICK),-cells=quick,-out=docs/benchmarks/hop) $(if $(ABLATE),-ablate) $(if $(ADDRESSES),-addresses -rounds=3 -duration=5s) $(if $(MILLION),-requests=1000000 -duration=10s) $(HOP_FLAGS)

## bench-claims: what claims, bursts of them, claims beside a noisy team, lists, and whole lives cost; on pods without processes
.PHONY: bench-claims
bench-claims: ground
	go test ./allocator -run '^$$' -bench 'List$$'
	go test ./allocator/rest -run '^$$' -bench 'Create$$'
	go test ./bench -run '^$$' -bench 'Claim|Batch|NoisyTeam|Drain|Lives|Handover|Memory' -benchtime 1x -timeout 60m -v

## bench-egress: what a request through the egress gateway costs beside other Envoys, and what a sandbox takes there
.PHONY: bench-egress
bench-egress:
	go test ./egress -run '^$$' -bench 'Hop$$' -benchtime 1x -timeout 20m
	go test ./egress/control -run '^$$' -bench Memory -benchtime 1x
	go test ./egress/policy -run '^$$' -bench Decide

## bench-console: what pages of the console cost a leader with 5,000 sandboxes
.PHONY: bench-console
bench-console:
	go test ./allocator -run '^$$' -bench 'Console$$' -benchtime 300x

## bench-demand: how many claims find a warm pod in four minutes with bursts, and what that costs, beside a fixed pool; on pods without processes
.PHONY: bench-demand
bench-demand: ground
	go test ./bench -run '^$$' -bench 'Demand' -benchtime 1x -timeout 20m -v

## bench-cache: what a hit in the route cache costs against a bare LRU, and what a route takes
.PHONY: bench-cache
bench-cache:
	go test ./routecache -run '^$$' -bench 'Hit$$|Memory' -benchtime 1x -count 3

## bench-activity: what a touch, looks at Envoy, reports and deadlines cost with 10,000 to 200,000 sandboxes
.PHONY: bench-activity
bench-activity: ground
	go test ./lastactive -run '^$$' -bench . -count 3
	go test ./lastactive/look -run '^$$' -bench CostOfLooks -benchtime 1x
	go test ./allocator/core -run '^$$' -bench 'Activity|Deadlines' -benchtime 1x -count 3

## bench-reap: how long after its idle timeout a sandbox is gone on every router, and how long requests are held meanwhile
.PHONY: bench-reap
bench-reap: ground
	go test ./bench -run '^$$' -bench 'Reap' -benchtime 1x -timeout 20m -v

## bench-fence: how long after a release all routers have acknowledged it, with 300 others in flight; without and with Envoys
.PHONY: bench-fence
bench-fence: ground
	go test ./bench -run '^$$' -bench 'Fence' -benchtime 1x -timeout 30m -v

## bench-agent: what a command costs through Envoy, how fast files move, what configuration adds to a claim, how fast agents start
.PHONY: bench-agent
bench-agent: ground
	go test ./bench -run '^$$' -bench 'Agent' -benchtime 1x -timeout 40m -v

## bench-sleep: what a request that wakes its sandbox costs against one to the same sandbox awake, one after the other and 50 at once; what stops and the wakes after them cost
.PHONY: bench-sleep
bench-sleep: ground
	go test ./bench -run '^$$' -bench 'Sleep|Stop' -benchtime 1x -timeout 20m -v

## bench-computesdk: the time from a create to the end of a first command as ComputeSDK's benchmark takes it: one after the other, staggered, and 100 at once
.PHONY: bench-computesdk
bench-computesdk: ground
	go test ./bench -run '^$$' -bench 'ComputeSDK' -benchtime 1x -timeout 40m -v

## image-archives: build the container images as archives in bin/images, as VERSION (default: that of internal/version); needs no Docker
.PHONY: image-archives
image-archives:
	@CGO_ENABLED=0 go run -trimpath ./tools/images $(if $(VERSION),--version='$(VERSION)') --output=bin/images

## images: build the container images and load them into Docker
.PHONY: images
images: image-archives
	@docker version >/dev/null 2>&1 || { echo "not loaded: there is no Docker here, or it does not run. The images are in bin/images, for docker load or kind load image-archive" >&2; exit 1; }
	@for image in allocator router agent demo-sandbox envoy; do docker load --input "bin/images/$$image.tar" || exit 1; done

## release: build what a release has into bin/release, twice, and compare
.PHONY: release
release:
	@tools/release

## vulnerabilities: known vulnerabilities in what the programs use; needs the database of Go on the network
.PHONY: vulnerabilities
vulnerabilities:
	$(call tool,release) govulncheck ./...

## lint: formatting, vet and golangci-lint
.PHONY: lint
lint:
	@files=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$files" ] || { echo "not gofmt-ed: $$files"; exit 1; }
	@echo "building golangci-lint, if it is not in Go's build cache"
	$(call tool,lint) golangci-lint run ./...
	cd tools/monitoring && go vet ./...

# The tests that write and check the generated parts of docs/ and the golden files that
# need nothing built.
REFERENCES := ./api ./api/apierror ./api/metric ./allocator ./cmd/allocator ./cmd/berth ./cmd/extproc ./envoy ./tools/docs

# Packages of this branch's changes, with those that are not committed.
BASE ?= main
changed = $(shell { git diff --name-only --diff-filter=d $$(git merge-base HEAD $(BASE)); git ls-files --others --exclude-standard; } | grep '\.go$$' | sort -u)
changed_packages = $(sort $(addprefix ./,$(dir $(changed))))

## precommit: formatting, vet and lint of the packages that changed since BASE (main), generated files, mutations
.PHONY: precommit
precommit:
	@[ -z "$(changed)" ] || { files=$$(gofmt -l $(changed)); [ -z "$$files" ] || { echo "not gofmt-ed: $$files"; exit 1; }; }
	@[ -z "$(changed)" ] || go vet $(changed_packages)
	@[ -z "$(changed)" ] || $(call tool,lint) golangci-lint run $(changed_packages)
	@$(MAKE) --no-print-directory check-generated check-mutations

## generate: write the generated code: deepcopy, CRDs (also those of the chart), control protocol, journal, agent, dashboards, rules
.PHONY: generate
generate:
	tools/generate

## check-generated: fail if the generated code, docs/reference or docs/invariants.md is stale
.PHONY: check-generated
check-generated: generate
	@git diff --exit-code -- agent api charts/berth/files || { echo "generated code is out of date: run make generate and commit"; exit 1; }
	go test $(REFERENCES) -run GoldenFile

# Tests of several packages write parts of one page: not at the same time.
## golden: write the golden files and the generated parts of docs/ anew
.PHONY: golden
golden:
	go test -p 1 $(REFERENCES) ./charts -run GoldenFile -update

## clean: remove bin/; the cache outside the tree stays
.PHONY: clean
clean:
	rm -rf bin
