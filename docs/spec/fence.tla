-------------------------------- MODULE fence --------------------------------
(* The fence of docs/design/fence.md: when a pod may be deleted, and an address serve another sandbox.
   README.md beside this file says what is modelled, what is left out and why that is sound, and how to check it. *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS Routers,    \* sessions of router processes; a restarted process has a new ID
          Sandboxes,  \* sandbox IDs; none is used twice
          Addresses,  \* of pods; each has one pod at a time
          Terms,      \* 1..n
          MaxStale,   \* Config.MaxStale
          Lease,      \* Config.Lease
          Window,     \* Config.ConnectWindow
          Break       \* "none", or the rule that is broken to see an invariant fail

VARIABLES journal, leader, router, pod, flying, deleted
vars == <<journal, leader, router, pod, flying, deleted>>

None == "none"
Idle == "idle"
Max(a, b) == IF a > b THEN a ELSE b
Less(timer) == IF timer > 0 THEN timer - 1 ELSE timer
Expiry == IF Break = "expiry" THEN MaxStale - 1 ELSE MaxStale

Init ==
  \* What the API server stores. phase: none, live, released, ended. retired: pods whose deletion is intended.
  /\ journal = [term |-> 0, phase |-> [s \in Sandboxes |-> None], at |-> [s \in Sandboxes |-> None],
                sessions |-> {}, retired |-> {}]
  \* A leader's memory. lease: for how long it is certain to hold the lease. expires: of each session. wait and window
  \* are the fence of a released sandbox: cleared when window is at least 0, complete when it is 0.
  /\ leader = [t \in Terms |-> [lease |-> 0, phase |-> [s \in Sandboxes |-> None], sessions |-> {},
                expires |-> [r \in Routers |-> 0], wait |-> [s \in Sandboxes |-> {}],
                window |-> [s \in Sandboxes |-> -1], tainted |-> {}]]
  \* A router. term: of the leader at the other end of its stream. queue: the messages in that stream. fresh: for how
  \* long it serves its routes. ping: what the last ping adds to that. unread: the sandboxes with an answer that Envoy
  \* may not have read. owes: the releases that it has applied and not acknowledged. acked is for I2 only.
  /\ router = [r \in Routers |-> [up |-> TRUE, term |-> 0, queue |-> <<>>, routes |-> {}, fresh |-> 0, ping |-> 0,
                unread |-> {}, owes |-> {}, acked |-> {}]]
  \* holder: none (there is no pod), idle, or a sandbox. foul: a request of another sandbox has reached the pod.
  /\ pod = [a \in Addresses |-> [holder |-> Idle, foul |-> FALSE]]
  /\ flying = [s \in Sandboxes |-> 0]  \* for how long requests that Envoy knows of may still connect
  /\ deleted = {}                      \* the sandboxes whose pods Berth has deleted, for I3 only

Leads(t) == journal.term = t           \* its commits succeed
Complete(t, s) == leader[t].phase[s] = "released" /\ leader[t].window[s] = 0
\* taint.Pod.AddressTainted: routers may have a route to this address, as far as this leader knows.
Routed(t, a) == \E s \in Sandboxes : journal.at[s] = a /\ leader[t].phase[s] \in {"live", "released"} /\ ~Complete(t, s)
Snapshot(t, r) == [kind |-> "snapshot", routes |-> {s \in Sandboxes : leader[t].phase[s] = "live"},
                   released |-> {s \in Sandboxes : r \in leader[t].wait[s]}]
\* member.Ledger.Reachable: a message goes to every connected router whose session is durable.
Send(t, kind, s) == router' = [r \in Routers |-> IF router[r].term = t /\ r \in leader[t].sessions
  THEN [router[r] EXCEPT !.queue = Append(@, [kind |-> kind, sandbox |-> s])] ELSE router[r]]
Serves(r, s) == router[r].fresh > 0 /\ s \in router[r].routes
\* No request of a sandbox is on its way, and no router admits one.
Quiet(s) == flying[s] = 0 /\ \A r \in Routers : s \notin router[r].unread /\ ~Serves(r, s)

\* ==== Leaders

\* journal.Open, Core.Recover, routers.recover: the next leader deposes the last one, which does not learn it.
TakeOver(t) ==
  /\ t = journal.term + 1
  /\ journal' = [journal EXCEPT !.term = t]
  /\ leader' = [leader EXCEPT ![t] = [lease |-> Lease, phase |-> journal.phase,
       sessions |-> IF Break = "recovery" THEN {} ELSE journal.sessions,
       expires |-> [r \in Routers |-> IF r \notin journal.sessions THEN 0
                                      ELSE IF Break = "margin" THEN Expiry ELSE Expiry + Lease],
       wait |-> [s \in Sandboxes |-> IF journal.phase[s] = "released" /\ Break # "recovery"
                                      THEN journal.sessions ELSE {}],
       window |-> [s \in Sandboxes |-> -1],
       tainted |-> {a \in Addresses : pod[a].holder = Idle /\ Break # "taint"
                     /\ \E s \in Sandboxes : journal.at[s] = a /\ journal.phase[s] \in {"live", "released"}}]]
  /\ UNCHANGED <<router, pod, flying, deleted>>

\* ==== Sessions

\* routers.join: a known router gets a snapshot while the lease is certain. A new session is not durable yet. A router
\* does not go back to an earlier term (Client.accept).
Join(r, t) ==
  /\ router[r].up /\ t <= journal.term /\ (t >= router[r].term \/ Break = "term")
  /\ LET known == r \in leader[t].sessions \/ Break = "durable"
     IN /\ known => leader[t].lease > 0
        /\ router' = [router EXCEPT ![r].term = t, ![r].queue = IF known THEN <<Snapshot(t, r)>> ELSE <<>>,
                                    ![r].ping = 0, ![r].owes = {}]
        /\ leader' = [leader EXCEPT ![t].expires[r] = Max(@, Expiry), ![t].sessions = IF known THEN @ \union {r} ELSE @]
  /\ UNCHANGED <<journal, pod, flying, deleted>>

\* member.Ledger.Recorded, routers.welcome: the session is durable. Only now the router receives routes.
Record(r, t) ==
  /\ router[r].up /\ router[r].term = t /\ Leads(t) /\ r \notin leader[t].sessions
  /\ journal' = [journal EXCEPT !.sessions = @ \union {r}]
  /\ leader' = [leader EXCEPT ![t].sessions = @ \union {r}]
  /\ router' = [router EXCEPT ![r].queue = <<Snapshot(t, r)>>]
  /\ UNCHANGED <<pod, flying, deleted>>

\* routers.ping, pong: a leader answers a ping while its lease is certain. What the ping adds counts from its sending.
Ping(r, t) ==
  /\ router[r].term = t /\ r \in leader[t].sessions
  /\ leader[t].lease > 0 \/ Break = "lease"
  /\ \A i \in DOMAIN router[r].queue : router[r].queue[i].kind # "pong"
  /\ leader' = [leader EXCEPT ![t].expires[r] = Max(@, Expiry)]
  /\ router' = [router EXCEPT ![r].ping = MaxStale, ![r].queue = Append(@, [kind |-> "pong"])]
  /\ UNCHANGED <<journal, pod, flying, deleted>>

\* routers.end: no fence waits for the session any more. A deposed leader ends it in its memory only, after a Goodbye or
\* a death.
End(r, t) ==
  /\ r \in leader[t].sessions
  /\ leader' = [leader EXCEPT ![t].sessions = @ \ {r}, ![t].expires[r] = 0,
                              ![t].wait = [s \in Sandboxes |-> @[s] \ {r}]]
  /\ journal' = IF Leads(t) THEN [journal EXCEPT !.sessions = @ \ {r}] ELSE journal
  /\ router' = IF router[r].term = t THEN [router EXCEPT ![r].queue = <<>>, ![r].ping = 0, ![r].owes = {}] ELSE router
  /\ UNCHANGED <<pod, flying, deleted>>
Leave(r, t) == ~router[r].up /\ End(r, t)                                      \* routers.goodbye, dead
DeclareDead(r, t) == (~router[r].up \/ Break = "lie") /\ Leads(t) /\ End(r, t) \* routers.declareDead, declaredDead
\* routers.expire: the end counts when it is durable. Break = "deposed": it counts at once, also for a deposed leader.
Expire(r, t) == leader[t].expires[r] = 0 /\ Break # "silence" /\ (Leads(t) \/ Break = "deposed") /\ End(r, t)

\* ==== Routers

\* admission.Sandboxes.Admit: the router admits requests whenever it can, and Envoy does not read the answers yet.
Admit(x) == IF x.fresh > 0 THEN [x EXCEPT !.unread = @ \union x.routes] ELSE x

\* stream.apply: messages take effect in their order.
Deliver(r) ==
  /\ router[r].queue # <<>>
  /\ LET m == Head(router[r].queue)
         x == [router[r] EXCEPT !.queue = Tail(@)]
     IN router' = [router EXCEPT ![r] = Admit(
          CASE m.kind = "snapshot" -> [x EXCEPT !.routes = m.routes, !.owes = m.released]
            [] m.kind = "route"    -> [x EXCEPT !.routes = @ \union {m.sandbox}]
            [] m.kind = "release"  -> [x EXCEPT !.routes = @ \ {m.sandbox}, !.owes = @ \union {m.sandbox}]
            [] m.kind = "pong"     -> [x EXCEPT !.fresh = Max(@, x.ping), !.ping = 0])]
  /\ UNCHANGED <<journal, leader, pod, flying, deleted>>

\* admission.Answers.Barrier, routers.acknowledge: Envoy has read the answers of before, the last one at this moment.
Acknowledge(r, s) ==
  /\ s \in router[r].owes
  /\ router' = [router EXCEPT ![r].owes = @ \ {s}, ![r].acked = @ \union {s},
                              ![r].unread = IF Break = "unread" THEN @ ELSE @ \ {s}]
  /\ flying' = [flying EXCEPT ![s] = IF s \in router'[r].unread \/ s \notin router[r].unread THEN @ ELSE Window]
  /\ leader' = [leader EXCEPT ![router[r].term].wait[s] = @ \ {r}]
  /\ UNCHANGED <<journal, pod, deleted>>

\* The process ends, killed or in order. Envoy reads the last answers before that, or within the stall budget, which is
\* part of the window.
Exit(r) ==
  /\ router[r].up
  /\ router' = [router EXCEPT ![r] = [up |-> FALSE, term |-> 0, queue |-> <<>>, routes |-> {}, fresh |-> 0, ping |-> 0,
                unread |-> {}, owes |-> {}, acked |-> {}]]
  /\ flying' = [s \in Sandboxes |-> IF s \in router[r].unread THEN Window ELSE flying[s]]
  /\ UNCHANGED <<journal, leader, pod, deleted>>

\* ==== Sandboxes and pods

\* Core.bind, grant, routers.sendRoute: a pod is handed out, if no stale route leads or led to it. The claim is durable.
Claim(t, s, a) ==
  /\ Leads(t) /\ journal.phase[s] = None /\ pod[a].holder = Idle
  /\ a \notin leader[t].tainted \union journal.retired
  /\ ~Routed(t, a) \/ Break = "taint"
  /\ journal' = [journal EXCEPT !.phase[s] = "live", !.at[s] = a]
  /\ leader' = [leader EXCEPT ![t].phase[s] = "live"]
  /\ pod' = [pod EXCEPT ![a].holder = s]
  /\ Send(t, "route", s)
  /\ UNCHANGED <<flying, deleted>>

\* Core.released, startFence, routers.sendReleases: the release is durable.
Release(t, s) ==
  /\ Leads(t) /\ journal.phase[s] = "live"
  /\ journal' = [journal EXCEPT !.phase[s] = "released"]
  /\ leader' = [leader EXCEPT ![t].phase[s] = "released",
                              ![t].wait[s] = IF Break = "fence" THEN {} ELSE leader[t].sessions]
  /\ Send(t, "release", s)
  /\ UNCHANGED <<pod, flying, deleted>>

\* fence.Ledger.Advance: no session is left to wait for.
Clear(t, s) ==
  /\ leader[t].phase[s] = "released" /\ leader[t].wait[s] = {} /\ leader[t].window[s] = -1
  /\ leader' = [leader EXCEPT ![t].window[s] = IF Break = "window" THEN 0 ELSE Window]
  /\ UNCHANGED <<journal, router, pod, flying, deleted>>

\* The pod at an address is gone, and every leader sees that.
Gone(a) ==
  /\ pod' = [pod EXCEPT ![a] = [holder |-> None, foul |-> FALSE]]
  /\ leader' = [t \in Terms |-> [leader[t] EXCEPT !.tainted = @ \ {a}]]
  /\ journal' = [journal EXCEPT !.retired = @ \ {a}]

\* Core.advanceFences: a leader that was deposed does so as well, however late.
DeletePod(t, s) ==
  /\ Complete(t, s) /\ pod[journal.at[s]].holder = s  \* the deletion names the pod's UID
  /\ Gone(journal.at[s])
  /\ deleted' = deleted \union {s}
  /\ UNCHANGED <<router, flying>>

\* A user, a drain, an eviction, the end of a node; also an idle pod that Berth has retired (Core.advanceRetirement).
DeletedByOthers(a) ==
  /\ pod[a].holder # None
  /\ Gone(a)
  /\ UNCHANGED <<router, flying, deleted>>

\* Core.podSeen, locate: a new pod gets the address.
PodAppears(a) ==
  /\ pod[a].holder = None
  /\ pod' = [pod EXCEPT ![a].holder = Idle]
  /\ leader' = [t \in Terms |-> IF Routed(t, a) /\ Break # "taint"
                  THEN [leader[t] EXCEPT !.tainted = @ \union {a}] ELSE leader[t]]
  /\ UNCHANGED <<journal, router, flying, deleted>>

\* Core.retire: the intent to delete a tainted pod is durable.
Retire(t, a) ==
  /\ Leads(t) /\ a \in leader[t].tainted \ journal.retired /\ ~Routed(t, a)
  /\ journal' = [journal EXCEPT !.retired = @ \union {a}]
  /\ UNCHANGED <<leader, router, pod, flying, deleted>>

\* Core.tryEnd: the next leader need not know the sandbox any more.
Ended(t, s) ==
  /\ Leads(t) /\ Complete(t, s) /\ pod[journal.at[s]].holder # s
  /\ journal.at[s] \notin leader[t].tainted \ journal.retired \/ Break = "blocked"
  /\ journal' = [journal EXCEPT !.phase[s] = "ended"]
  /\ leader' = [leader EXCEPT ![t].phase[s] = "ended", ![t].window[s] = -1]
  /\ UNCHANGED <<router, pod, flying, deleted>>

\* A request reaches whichever pod is at the address.
Connect(s) ==
  /\ ~Quiet(s) /\ pod[journal.at[s]].holder \notin {None, s}
  /\ pod' = [pod EXCEPT ![journal.at[s]].foul = TRUE]
  /\ UNCHANGED <<journal, leader, router, flying, deleted>>

\* ==== Time

\* A leader renews its lease until it is deposed. Envoy reads the last answers of a router that goes stale within the
\* stall budget.
Tick ==
  /\ leader' = [t \in Terms |-> [leader[t] EXCEPT !.lease = IF Leads(t) THEN @ ELSE Less(@),
                  !.expires = [r \in Routers |-> Less(@[r])], !.window = [s \in Sandboxes |-> Less(@[s])]]]
  /\ router' = [r \in Routers |-> [router[r] EXCEPT !.fresh = Less(@), !.ping = Less(@),
                                                    !.unread = IF router[r].fresh = 1 THEN {} ELSE @]]
  /\ flying' = [s \in Sandboxes |-> IF \E r \in Routers : router[r].fresh = 1 /\ s \in router[r].unread
                                    THEN Window ELSE Less(flying[s])]
  /\ UNCHANGED <<journal, pod, deleted>>

Next ==
  \/ \E t \in Terms : TakeOver(t)
  \/ \E r \in Routers, t \in Terms : \/ Join(r, t) \/ Record(r, t) \/ Ping(r, t)
                                     \/ Leave(r, t) \/ DeclareDead(r, t) \/ Expire(r, t)
  \/ \E r \in Routers : Deliver(r) \/ Exit(r)
  \/ \E r \in Routers, s \in Sandboxes : Acknowledge(r, s)
  \/ \E t \in Terms, s \in Sandboxes : \/ Release(t, s) \/ Clear(t, s) \/ DeletePod(t, s) \/ Ended(t, s)
                                       \/ \E a \in Addresses : Claim(t, s, a)
  \/ \E a \in Addresses : DeletedByOthers(a) \/ PodAppears(a) \/ \E t \in Terms : Retire(t, a)
  \/ \E s \in Sandboxes : Connect(s)
  \/ Tick
Spec == Init /\ [][Next]_vars

\* The last leader is stable. A router that is connected again and again makes progress in the end.
Last == CHOOSE t \in Terms : \A u \in Terms : u <= t
FairSpec ==
  /\ Spec /\ WF_vars(Tick) /\ WF_vars(\E t \in Terms : TakeOver(t))
  /\ \A r \in Routers : WF_vars(Leave(r, Last)) /\ WF_vars(Expire(r, Last)) /\ SF_vars(Deliver(r))
  /\ \A r \in Routers, s \in Sandboxes : SF_vars(Acknowledge(r, s))
  /\ \A s \in Sandboxes : WF_vars(Clear(Last, s)) /\ WF_vars(DeletePod(Last, s)) /\ WF_vars(Ended(Last, s))
  /\ \A a \in Addresses : WF_vars(Retire(Last, a))

\* ==== Promises (docs/invariants.md)

\* No request of a sandbox reaches a pod that another sandbox has or gets.
I1 == \A a \in Addresses : pod[a].holder \in Sandboxes => ~pod[a].foul

\* A router that has acknowledged a release has no route of the sandbox, and gets none.
I2 == \A r \in Routers : router[r].acked \intersect router[r].routes = {}

\* Nothing of a sandbox is on its way when Berth deletes its pod, or another sandbox has its address.
I3 == \A s \in Sandboxes :
  journal.at[s] # None /\ (s \in deleted \/ pod[journal.at[s]].holder \in Sandboxes \ {s}) => Quiet(s)

\* A released sandbox ends: its pod is deleted, and the next leader need not know it.
Ends == \A s \in Sandboxes : journal.phase[s] = "released" ~> journal.phase[s] = "ended"

Symmetry == Permutations(Routers) \union Permutations(Sandboxes) \union Permutations(Addresses)
=============================================================================
